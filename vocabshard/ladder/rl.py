"""L5: the RL run of examples/rl_loop, as a rung."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vocabshard.ladder.rungs import Rung


def find_loop() -> Path | None:
    """examples/rl_loop/loop.py of the source tree that the package lies in, if it does."""
    loop = Path(__file__).parent.parent.parent / "examples" / "rl_loop" / "loop.py"
    return loop if loop.is_file() else None


def rl_run(loop: Path, *options: str) -> tuple[Rung, dict[str, Any]]:
    """Runs it; the rung counts tokens whose log-prob in training is not the recorded one. Also the whole record.

    Raises: RuntimeError with the script's words when it fails.
    """
    rung = Rung("L5", "RL run, every token before its update")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, str(loop), "--quiet", "--out", str(out), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not out.is_file():
            raise RuntimeError(f"{loop} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
        record = json.loads(out.read_text())
    summary = record["summary"]
    rung.rows, rung.differing = summary["tokens"], summary["differing_tokens"]
    rung.ordinary_rows, rung.ordinary_differing = summary["tokens"], summary["ordinary_differing_tokens"]
    rung.first = next((f"step {s['step']}" for s in record["steps"] if s["differing"]), "")
    rung.detail = summary
    return rung.done(), record
