"""What `vocabshard score` is asked to do: arguments and input, checked before any rank starts or any model loads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.errors import InputError, require
from vocabshard.command.files import writable
from vocabshard.command.hidden import Span, Windows, choose_windows, spans_of
from vocabshard.command.recording import partial_of
from vocabshard.command.tokens import ALL, COMPLETION, Tokens, is_json_lines, read_sequences

TILE = 16  # shard boundaries at multiples of it keep the bytes independent of the sharding


@dataclass(frozen=True)
class Job:
    """What is to be scored and how; all of it checked."""

    checkpoint: Checkpoint
    text: Path
    out: Path
    plot: Path | None
    sequences: list[Tokens]
    scope: str
    sizes: list[int]  # rows of the head on each rank
    real_vocab_size: int
    windows: Windows
    batch_windows: int
    batch_rows: int
    dtype: str
    threads: int
    quiet: bool

    @property
    def spans(self) -> list[Span]:
        """The windows that the model sees, which give every token to score once, in order."""
        return spans_of(self.sequences, self.windows)

    @property
    def targets(self) -> list[int]:
        """The ids of all tokens to score, in order."""
        return [token for tokens in self.sequences for token in tokens.ids[tokens.context :]]


MOST_RANKS = 64  # all on this machine, each a process that holds torch


def choose_tp(args: argparse.Namespace, world_size: int | None) -> int:
    """The number of shards that --tp, --sizes and torchrun (`world_size`, if it runs us) agree on."""
    stated = {"--tp": args.tp, "--sizes": args.sizes and len(args.sizes), "torchrun": world_size}
    given = {name: count for name, count in stated.items() if count is not None}
    if len(set(given.values())) > 1:
        raise InputError(
            "expected one number of ranks, got " + ", ".join(f"{count} by {name}" for name, count in given.items())
        )
    tp = next(iter(given.values()), 1)
    if not 1 <= tp <= MOST_RANKS:
        raise InputError(f"--tp: expected 1 to {MOST_RANKS} ranks, got {tp}")
    return tp


def split_rows(rows: int, tp: int) -> list[int]:
    """Sizes of `tp` shards of `rows` rows, as even as whole tiles of 16 rows allow; the last ones may be empty."""
    tiles = -(-rows // TILE)
    bounds = [min(rows, TILE * -(-tiles * rank // tp)) for rank in range(tp + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def choose_sizes(sizes: Sequence[int] | None, tp: int, rows: int, real: int) -> list[int]:
    """The sizes asked for, or even ones over all rows. Their sum may leave out the padding, not a part of it."""
    if sizes is None:
        return split_rows(rows, tp)
    if min(sizes) < 0 or sum(sizes) not in (rows, real):
        expected = f"{rows} rows" if rows == real else f"{rows} rows, or {real} without the padding"
        raise InputError(
            f"--sizes: expected sizes of 0 or more that add up to the head's {expected}, got "
            f"{','.join(map(str, sizes))} = {sum(sizes)}"
        )
    return list(sizes)


def prepare(args: argparse.Namespace, tp: int) -> Job:
    """Checks everything that can be checked without loading the model. Raises InputError."""
    out = writable("--out", args.out, args.text)
    if partial_of(out).is_symlink():  # what it names is not this command's to write
        raise InputError(
            f"--out {out}: {partial_of(out)}, where the records are kept until all are there, is a symbolic link; "
            "remove it or choose another --out"
        )
    writable("--out", str(partial_of(out)), args.text)
    plot = None if args.plot is None else writable("--plot", args.plot, args.text)
    if plot is not None:
        require("matplotlib", "plot")
        if plot == out:
            raise InputError(f"--plot {plot}: is where the records go; choose another name")
    for name in ("batch_rows", "batch_windows", "threads"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: expected 1 or more, got {getattr(args, name)}")
    checkpoint = Checkpoint.open(args.checkpoint)
    real = checkpoint.real_vocab_size(args.real_vocab_size)
    sequences = read_sequences(Path(args.text), checkpoint, args.score, real)
    return Job(
        checkpoint=checkpoint,
        text=Path(args.text),
        out=out,
        plot=plot,
        sequences=sequences,
        scope=args.score or (COMPLETION if is_json_lines(Path(args.text)) else ALL),
        sizes=choose_sizes(args.sizes, tp, checkpoint.head_shape[0], real),
        real_vocab_size=real,
        windows=choose_windows(checkpoint, args.window, args.stride),
        batch_windows=args.batch_windows,
        batch_rows=args.batch_rows,
        dtype=args.dtype,
        threads=args.threads,
        quiet=args.quiet,
    )
