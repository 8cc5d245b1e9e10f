"""The benchmarks run where there is no GPU, on a small shape, and report what they say they report."""

from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vocabshard.kernels import reference

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "linear_logp.py"


Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script in this process: others would each import torch."""

    def run_it(script: Path, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        runpy.run_path(str(script), run_name="__main__")

    return run_it


def test_report(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, png = tmp_path / "out" / "linear.json", tmp_path / "out" / "linear.png"
    arguments = ["--configs", "5,16,100;33,64,300", "--backends", "auto,torch", "--rounds", 3, "--dtype", "fp32"]
    run(SCRIPT, *arguments, "--json", out, "--png", png)
    report = json.loads(out.read_text())
    assert list(report["configs"]) == ["5 x 16 x 100", "33 x 64 x 300"]
    for entry in report["configs"].values():
        assert set(entry) == {"product", "vocabshard auto", "vocabshard torch", "torch", "torch, fp32 log_softmax"}
        for name, values in entry.items():
            assert values["forward ms"] > 0
            if name != "product":
                assert values["forward ratio"] > 0 and values["forward + backward ratio"] > 0
                assert values["error"] < 1e-5
    assert {"versions", "commit", "dtype", "device", "date", "command"} <= set(report["environment"])
    assert png.read_bytes().startswith(b"\x89PNG")


def test_budgets_and_variants(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, png = tmp_path / "kept.json", tmp_path / "memory.png"
    dtype = "bf16" if torch.cuda.is_available() else "fp32"  # Hopper's kernels keep logits of bf16 alone
    arguments = ["--configs", "9,16,100", "--rounds", 3, "--dtype", dtype, "--kept", "0,0.5,1"]
    run(SCRIPT, *arguments, "--variants", "frozen,entropy", "--json", out, "--memory-png", png)
    (entry,) = json.loads(out.read_text())["configs"].values()
    floors = {name: values["floor"] for name, values in entry.items() if "floor" in values}
    assert floors["vocabshard auto"] == floors["vocabshard auto, 50% kept"] == "z z dH dW"
    assert floors["vocabshard auto, 100% kept"] == "z dH dW" and floors["vocabshard auto, frozen"] == "z z dH"
    assert entry["vocabshard auto, entropy"]["forward + backward ratio"] > 0
    assert {"z ms", "z z dH dW ms", "z dH dW ms", "z z dH ms"} <= set(entry["product"])
    assert png.read_bytes().startswith(b"\x89PNG")


def test_what_is_asked_for_and_missing_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [("--peers", "nobody", "takes"), ("--backends", "nothing", "takes")]
    if importlib.util.find_spec("cut_cross_entropy") is None:
        missing.append(("--peers", "cce", "cannot be imported"))
    monkeypatch.setattr(reference, "kept_bytes_per_row", lambda *_: 0)
    missing.append(("--backends=torch", "--kept=1", "keeps none"))
    for option, value, message in missing:
        with pytest.raises(SystemExit, match=message):
            run(SCRIPT, "--configs", "1,8,16", option, value)


def test_over_a_group(tmp_path: Path) -> None:
    out = tmp_path / "out" / "tp.json"
    script = SCRIPT.with_name("multigpu.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    arguments = ["--heads", "16,300", "--rows", "8", "--rounds", "3", "--dtype", "fp32", "--json", str(out)]
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["environment"]["ranks"] == 2
    (entry,) = report["configs"].values()
    assert not [name for name in entry if "failed" in name]
    for name in ("group", "sequence parallel", "one rank", "materialised"):
        assert entry[f"{name} forward"] > 0 and entry[f"{name} forward + backward"] > 0
    assert {"share of gather + fold", "share of dH not hidden", "efficiency"} < set(entry)


def test_weight_fingerprint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run(SCRIPT.with_name("weight_fingerprint.py"), "--rows", 300, "--depth", 40, "--rounds", 2)
    printed = capsys.readouterr().out
    assert "300 x 40 bf16: fingerprint" in printed and "share" in printed


def test_logits_evidence(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "logits.json"
    script = SCRIPT.with_name("batch_invariant_logp.py")
    options = "--device cpu --parts accuracy,invariance --size 5x600 --sweep 33x300 --json".split()
    run(script, *options, out)
    report = json.loads(out.read_text())
    assert report["invariance"]["vocabshard"] == {"rows": 469, "differing logp": 0, "differing gradients": 0}
    ours, theirs = report["accuracy"]["vocabshard"], report["accuracy"]["torch bf16"]
    assert ours["largest logp error"] < 1e-5 < theirs["largest logp error"]
    assert ours["correctly rounded gradients %"] > 99 and ours["gradient dtype"] == "bfloat16"
    assert report["environment"]["build"] and "torch" in report["environment"]
