"""Hidden states of sequences, by the transformers base model without its head, in windows of a fixed length."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.errors import InputError, first_line, require
from vocabshard.command.tokens import Tokens


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


@dataclass(frozen=True)
class Span:
    """One window of one sequence: the model sees tokens [start, stop), and positions [first, stop) are wanted."""

    sequence: int
    start: int
    stop: int
    first: int

    def __len__(self) -> int:
        return self.stop - self.first


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


def spans_of(sequences: Sequence[Tokens], windows: Windows) -> list[Span]:
    """The windows that give every scored token's position, in the order of the tokens; those of a prompt alone not."""
    found = []
    for number, tokens in enumerate(sequences):
        for start, stop, new in windows.spans(len(tokens.ids) - 1):
            first = max(new, tokens.context - 1)  # the state at a position predicts the token after it
            if first < stop:
                found.append(Span(number, start, stop, first))
    return found


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
    model: torch.nn.Module, sequences: Sequence[Tokens], spans: Sequence[Span], batch: int, threads: int, skip: int = 0
) -> Iterator[torch.Tensor]:
    """fp32 [rows, D] of the wanted positions after the first `skip`, from `batch` windows at a time.

    Windows of a batch are filled up on the right, which causal models do not see. The bits depend on windows, batch
    and threads, on nothing of the head, nor on `skip`: a batch is made as a whole or not at all.
    """
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    for at in range(0, len(spans), batch):
        some = spans[at : at + batch]
        count = sum(map(len, some))
        if skip >= count:
            skip -= count
            continue
        ids = torch.zeros(len(some), max(span.stop - span.start for span in some), dtype=torch.int64)
        for row, span in zip(ids, some, strict=True):
            row[: span.stop - span.start] = torch.tensor(sequences[span.sequence].ids[span.start : span.stop])
        with torch.no_grad(), _threads(threads):
            states = model(input_ids=ids, **options).last_hidden_state.float()
        wanted = [
            state[span.first - span.start : span.stop - span.start] for state, span in zip(states, some, strict=True)
        ]
        yield torch.cat(wanted)[skip:]
        skip = 0


def in_chunks(blocks: Iterable[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """The same rows, `size` at a time; the last chunk holds what is left."""
    kept: list[torch.Tensor] = []
    count = 0
    for block in blocks:
        kept.append(block)
        count += len(block)
        if count >= size:
            *whole, rest = torch.cat(kept).split(size)
            if len(rest) == size:
                whole, rest = [*whole, rest], rest[:0]
            yield from whole
            kept, count = [rest], len(rest)
    if count:
        yield torch.cat(kept)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
