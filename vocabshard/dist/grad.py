"""grad_hidden over the group: every rank's share summed, or one rank going on where the one before stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vocabshard.dist.gather import (
    Pending,
    pass_rows_on,
    rank_and_size,
    start_broadcast_from_last,
    start_sum,
    start_sum_for,
    start_sum_of_own_rows,
)

# Rows of a chunk that is passed on: at most CHUNKS of them, and none so small that the products suffer.
CHUNKS, CHUNK_ROWS = 8, 512
# The ordinary sum: at most so many parts, none smaller than that.
MOST_PARTS, PART_ELEMENTS = 4, 1 << 22


class HiddenSum:
    """The sum over the group, under way from `start` on: a GradPlan's hidden_ready.

    wire_dtype is what travels and what the collective adds in. own_rows: each rank gets its share of the rows alone.
    """

    def __init__(self, group: Any, wire_dtype: torch.dtype, own_rows: bool) -> None:
        self._group, self._wire_dtype, self._own_rows = group, wire_dtype, own_rows
        self._rank, self._size = rank_and_size(group)
        self._parts = 1
        self._pending: list[Pending] = []

    def parts(self, rows: int, depth: int) -> tuple[slice, ...]:
        """A GradPlan's ready_rows: of what all ranks share alone. Parts travel while later ones are made, and each is
        large enough for a product of its own to fill a GPU."""
        most = rows * depth // PART_ELEMENTS
        count = (self._size if most >= self._size else 1) if self._own_rows else min(most, MOST_PARTS)
        if self._size == 1 or count <= 1:
            return ()
        self._parts = count
        return tuple(slice(rows * i // count, rows * (i + 1) // count) for i in range(count))

    def start(self, grad_hidden: Tensor) -> None:
        """Of everything, or of the next part."""
        if self._size == 1:
            self._pending.append(Pending(grad_hidden))
            return
        sent = grad_hidden.to(self._wire_dtype)
        if not self._own_rows:
            self._pending.append(start_sum(sent, self._group))
        elif self._parts == 1:
            self._pending.append(start_sum_of_own_rows(sent, self._group))
        else:
            self._pending.append(start_sum_for(len(self._pending), sent, self._group))

    def result(self, grad_hidden: Tensor) -> Tensor:
        """[N, D], or this rank's rows; waits on the current stream. grad_hidden: what `start` was given parts of."""
        assert len(self._pending) == self._parts, "the kernel's backward did not call hidden_ready as it was asked to"
        parts = [pending.wait() for pending in self._pending]
        if self._parts == 1:
            return parts[0]
        if self._own_rows:
            return parts[self._rank]
        return grad_hidden if self._wire_dtype == grad_hidden.dtype else torch.cat(parts)


def row_chunks(rows: int) -> list[slice]:
    """The same on every rank: of the number of rows alone."""
    step = max(CHUNK_ROWS, -(-rows // CHUNKS))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def continue_over_group(accumulators: Tensor, add: Callable[[slice], None], group: Any) -> Pending:
    """accumulators [N, D], zeros at first -> the same with every rank's columns added, in group-rank order.

    `add(rows)` adds this rank's columns to those rows in place. Ranks work on different chunks of rows at a time; then
    the last rank, which has them all, sends them to everybody.
    """
    rank, size = rank_and_size(group)
    chunks = row_chunks(accumulators.shape[0])
    sent: list[Pending] = []
    first, last = rank == 0, rank == size - 1
    came = None if first or not chunks else pass_rows_on(None, accumulators[chunks[0]], group)
    for i, rows in enumerate(chunks):
        if came is not None:
            came.wait()
        add(rows)
        following = accumulators[chunks[i + 1]] if i + 1 < len(chunks) and not first else None
        moved = pass_rows_on(None if last else accumulators[rows], following, group)
        came = moved if following is not None else None
        sent.append(moved)
    for moved in sent:
        moved.wait()
    return start_broadcast_from_last(accumulators, group)
