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
    start_sum_of_own_rows,
)

# Rows of a chunk that is passed on: at most CHUNKS of them, and none so small that the products suffer.
CHUNKS, CHUNK_ROWS = 8, 512


class HiddenSum:
    """The sum over the group, under way from `start` on: a GradPlan's hidden_ready.

    wire_dtype is what travels and what the collective adds in. own_rows: each rank gets its share of the rows alone.
    """

    def __init__(self, group: Any, wire_dtype: torch.dtype, own_rows: bool) -> None:
        self._group, self._wire_dtype, self._own_rows = group, wire_dtype, own_rows
        self._pending: Pending | None = None

    def start(self, grad_hidden: Tensor) -> None:
        if rank_and_size(self._group)[1] == 1:
            self._pending = Pending(grad_hidden)
            return
        begin = start_sum_of_own_rows if self._own_rows else start_sum
        self._pending = begin(grad_hidden.to(self._wire_dtype), self._group)

    def result(self) -> Tensor:
        """[N, D], or this rank's rows; waits on the current stream."""
        assert self._pending is not None, "the kernel's backward did not call hidden_ready"
        return self._pending.wait()


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
