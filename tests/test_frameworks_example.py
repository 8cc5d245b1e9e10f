"""Models with other projects' heads and with ours in their place: the same losses within rounding."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "examples" / "train" / "frameworks.py"


def test_losses_are_the_same_within_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported the projects for tests of their adapters."""
    for needed in ("tokenizers", "transformers", "matplotlib"):
        pytest.importorskip(needed)
    out, png = tmp_path / "losses.json", tmp_path / "losses.png"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(out), "--plot", str(png)])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("train", None)  # beside the script
    curves = json.loads(out.read_text())
    assert {"PyTorch, label smoothing", "transformers, Llama"} <= set(curves)
    for name, (own, ours) in curves.items():
        assert len(own) == len(ours) == 20 and own[-1] < own[0] - 0.5, name
        # fp32 has steps of 6e-8 relative; weights drift apart by roundings of the gradients
        assert max(abs(y - x) / x for x, y in zip(own, ours, strict=True)) < 1e-6, name
    assert png.read_bytes().startswith(b"\x89PNG")
