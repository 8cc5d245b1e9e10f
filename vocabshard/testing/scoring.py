"""For tests of `vocabshard score`: the command in this process, its records, and edits of a checkpoint's directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vocabshard.command import main

Edit = Callable[[Path], Any]


def score(checkpoint: Path, text: Path, out: Path, *options: object) -> int:
    """Runs the command quietly; its exit code."""
    return main(["score", str(checkpoint), str(text), "--out", str(out), "--quiet", *map(str, options)])


def token_lines(path: Path | str) -> list[str]:
    """A file's records of tokens, without the header and the summary."""
    return Path(path).read_text().splitlines()[1:-1]


def assert_refused(capsys: Any, code: int, out: Path, message: str) -> None:
    """Exit code 2, one line on stderr, no output at all; what was in `out`, "old" in a folder of its own, still is."""
    printed, err = capsys.readouterr()
    assert (code, printed) == (2, "")
    assert err.startswith("vocabshard: error: "), err
    assert err.count("\n") == 1, err
    assert message in err
    assert sorted(path.name for path in out.parent.iterdir()) == ["old.jsonl"]
    assert (out.parent / "old.jsonl").read_text() == "old"


def edit_config(**changes: Any) -> Edit:
    """Sets entries of a checkpoint's config."""

    def apply(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def edit_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Edit:
    """Changes a checkpoint's tensors in its one file."""

    def apply(directory: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    return apply
