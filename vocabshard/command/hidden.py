"""Hidden states of a sequence, by the transformers base model without its head, in windows of a fixed length."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.errors import InputError, first_line, require


@dataclass(frozen=True)
class Windows:
    """The model sees `length` positions at once; window `k` starts at `k * stride` and gives what no earlier one gave.

    So every position but those of the first window has at least `length - stride` positions before it.
    """

    length: int
    stride: int

    def spans(self, positions: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, first new position) of each window over `positions`, which together give each exactly once."""
        start, done = 0, 0
        while done < positions:
            stop = min(start + self.length, positions)
            yield start, stop, done
            start, done = start + self.stride, stop


def choose_windows(checkpoint: Checkpoint, length: int | None, stride: int | None) -> Windows:
    """The windows asked for, by default as long as the model's context, each half a window after the other."""
    context = checkpoint.context
    if length is None:
        if context is None:
            raise InputError(f"{checkpoint.path / 'config.json'}: states no context length; say it with --window")
        length = context
    if length < 1 or (context is not None and length > context):
        raise InputError(f"--window: expected 1 to {context or 'the context of the model'}, got {length}")
    stride = max(1, length // 2) if stride is None else stride
    if not 1 <= stride <= length:
        raise InputError(f"--stride: expected 1 to the window's {length}, got {stride}")
    return Windows(length, stride)


def load_base_model(checkpoint: Checkpoint) -> torch.nn.Module:
    """The model without its head, in fp32 on the CPU. Raises InputError when any of its weights is missing."""
    transformers = require("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModel.from_pretrained(
            checkpoint.path,
            local_files_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except Exception as error:  # an unknown model type, a shape that does not fit: the library raises many kinds
        raise InputError(f"checkpoint {checkpoint.path}: the model cannot be loaded: {first_line(error)}") from error
    wrong = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in found.get(kind, ()))
    if wrong:
        raise InputError(
            f"checkpoint {checkpoint.path}: {len(wrong)} weights of the model are missing or of another "
            f"shape, the first is {wrong[0]}"
        )
    return model.eval()


def hidden_states(
    model: torch.nn.Module,
    ids: list[int],
    windows: Windows,
    threads: int,
    progress: Callable[[int], Any] = lambda done: None,
) -> torch.Tensor:
    """fp32 [len(ids), D], one window at a time; the bits depend on windows and threads, on nothing of the head.

    `progress` is called with the number of new positions after every window.
    """
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    rows = []
    with torch.no_grad(), _threads(threads):
        for start, stop, done in windows.spans(len(ids)):
            output = model(input_ids=torch.tensor([ids[start:stop]]), **options)
            rows.append(output.last_hidden_state[0, done - start :].float())
            progress(stop - done)
    return torch.cat(rows)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
