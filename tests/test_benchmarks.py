"""The benchmark of linear_logp runs where there is no GPU, on a small shape, and reports what it says it reports."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "linear_logp.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=200)


def test_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, png = tmp_path / "out" / "linear.json", tmp_path / "out" / "linear.png"
    arguments = ["--configs", "5,16,100;33,64,300", "--backends", "auto,torch", "--rounds", 3, "--dtype", "fp32"]
    done = run(*arguments, "--json", out, "--png", png)
    assert done.returncode == 0, done.stderr
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


def test_what_is_asked_for_and_missing_is_an_error() -> None:
    for arguments in (["--peers", "nobody"], ["--backends", "nothing"]):
        done = run("--configs", "1,8,16", *arguments)
        assert done.returncode != 0 and "takes" in done.stderr
    if importlib.util.find_spec("cut_cross_entropy") is None:
        done = run("--configs", "1,8,16", "--peers", "cce")
        assert done.returncode != 0 and "cannot be imported" in done.stderr
