"""L5: an RL run in which every log-prob recorded at rollout is recomputed in training to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vocabshard import launching

LOOP = Path(__file__).parent.parent / "examples" / "rl_loop" / "loop.py"


def run(tmp_path: Path, *options: str) -> tuple[dict, list[dict]]:
    out = tmp_path / "run.json"
    ranks = sum(int(options[options.index(name) + 1]) for name in ("--trainer-tp", "--rollout-tp"))
    assert launching.run(ranks, [str(LOOP), "--quiet", "--out", str(out), *options]) == 0
    found = json.loads(out.read_text())
    return found["summary"], found["steps"]


def check(summary: dict, steps: list[dict], count: int) -> None:
    assert len(steps) == count and summary["trainer_tp"] != summary["rollout_tp"]
    assert all(step["k3_max"] == 0 and step["differing"] == 0 for step in steps), "K3 of every token is exactly 0"
    assert summary["versions"] == count, "each step has weights of its own"
    assert summary["ordinary_differing_tokens"] > 0 and summary["ordinary_k3_max"] > 0
    assert summary["reward_last_10"] > summary["reward_first_10"] + summary["margin"]


def test_fifty_steps(tmp_path: Path) -> None:
    small = ("--groups", "2", "--samples", "4", "--response", "6")
    check(*run(tmp_path, "--steps", "50", "--trainer-tp", "2", "--rollout-tp", "1", *small), 50)


@pytest.mark.needs("sm90")
def test_on_a_gpu(tmp_path: Path) -> None:
    assert torch.cuda.is_available()
    check(*run(tmp_path, "--steps", "30", "--trainer-tp", "4", "--rollout-tp", "2"), 30)
