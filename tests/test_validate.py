"""`vocabshard validate`: its report, its picture, and its exit code when a row differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vocabshard.command import main
from vocabshard.ladder import Rung, levels

LOOP = """
import json, sys
step = {"step": 0, "reward": 0.5, "differing": %d, "k3_max": 0.0, "ordinary_k3_max": 1e-14}
summary = {"tokens": 8, "differing_tokens": %d, "ordinary_differing_tokens": 3}
open(sys.argv[sys.argv.index("--out") + 1], "w").write(json.dumps({"summary": summary, "steps": [step]}))
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = levels.repeat
    monkeypatch.setattr(levels, "repeat", lambda device: repeat(device, calls=20))


def loop(tmp_path: Path, differing: int) -> str:
    path = tmp_path / "loop.py"
    path.write_text(LOOP % (differing, differing))
    return str(path)


def test_report_and_picture(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "v.json", tmp_path / "v.png"
    arguments = ["validate", "--levels", "L1,L3,L5", "--device", "cpu", "--rl-loop", loop(tmp_path, 0)]
    assert main([*arguments, "--out", str(out), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "L1  0 of 792 rows differ" in said and "L5  0 of 8 rows differ" in said and "decode tokens/s" in said
    result = json.loads(out.read_text())
    assert result["holds"] and [rung["level"] for rung in result["rungs"]] == ["L1", "L3", "L3", "L5"]
    assert result["speed"]["decode_tokens_per_s"]["64"] > 0 and result["rl"]["steps"][0]["reward"] == 0.5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_row_that_differs(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--levels", "L5", "--device", "cpu", "--rl-loop", loop(tmp_path, 2)]) == 1
    assert "L5  2 of 8 rows differ" in capsys.readouterr().out


def test_nothing_climbed_is_not_a_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("vocabshard.command.validate.find_loop", lambda: None)
    assert main(["validate", "--levels", "L5", "--device", "cpu"]) == 1
    assert "L5  not climbed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--levels", "L1,L9"], "got 'L9'"),
        (["--levels", "L5", "--rl-loop", "nowhere.py"], "no such file"),
        (["--levels", "L1", "--out", "/nowhere/x.json"], "/nowhere does not exist"),
        (["--levels", "L1", "--out", "/tmp"], "is a directory, expected the name of a file"),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_broken_loop_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loop.py"
    path.write_text("raise SystemExit(3)")
    assert main(["validate", "--levels", "L5", "--device", "cpu", "--rl-loop", str(path)]) == 2
    assert "exit code 3" in capsys.readouterr().err


def test_a_rung_of_nothing_does_not_hold() -> None:
    assert not Rung("L1", "no rows").holds
