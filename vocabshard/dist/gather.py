"""Every collective of the library. Nothing else names one.

All results are in group-rank order and do not depend on how the collective is carried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


# newer torch renames them, and warns of the old names
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)

# From this many rows on a gather of rows comes in two pieces, so that work on the first hides the second.
PIECES_FROM = 2048


class Pending:
    """Collectives under way, and the tensor that will hold their result."""

    def __init__(self, result: Tensor, *works: Any, landing: Tensor | None = None) -> None:
        self._result, self._works, self._landing = result, works, landing

    def wait(self) -> Tensor:
        """The result, for work on the current stream."""
        for work in self._works:
            work.wait()
        self._works = ()
        if self._landing is not None:
            self._result.copy_(self._landing)
            self._landing = None
        return self._result


def rank_and_size(group: Any) -> tuple[int, int]:
    """This process's rank in the group and W; None is a group of this process alone."""
    if group is None:
        return 0, 1
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("a tp_group was given but torch.distributed is not initialised; call init_process_group first")
    if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of tp_group; call only from its members")
    return dist.get_rank(group), dist.get_world_size(group)


def gather_tensors(tensor: Tensor, group: Any) -> Tensor:
    """[...] -> [W, ...], one all-gather. Shapes and dtypes must agree on all ranks."""
    if group is None:
        return tensor[None]
    size = dist.get_world_size(group)
    flat = tensor.contiguous().view(-1)
    out = torch.empty(size * flat.numel(), dtype=tensor.dtype, device=tensor.device)
    if flat.numel():
        assert _all_gather is not None  # a group exists, so torch.distributed does
        _all_gather(out, flat, group=group)
    return out.view(size, *tensor.shape)


def gather_objects(value: Any, group: Any) -> list[Any]:
    """Any picklable value of each rank, in group-rank order."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def sum_over_group(tensor: Tensor, group: Any) -> Tensor:
    """In-place all-reduce; every rank ends with the same bytes."""
    if group is not None and dist.get_world_size(group) > 1 and tensor.numel():
        dist.all_reduce(tensor, group=group)
    return tensor


def start_sum(tensor: Tensor, group: Any) -> Pending:
    """In-place all-reduce; every rank ends with the same bytes."""
    return Pending(tensor, dist.all_reduce(tensor, group=group, async_op=True)) if tensor.numel() else Pending(tensor)


def start_sum_of_own_rows(tensor: Tensor, group: Any) -> Pending:
    """[N, ...] -> [N / W, ...]: this rank's rows of the sum."""
    rank, size = rank_and_size(group)
    rows = tensor.shape[0] // size
    if not tensor.numel():
        return Pending(tensor[rank * rows : (rank + 1) * rows])
    assert _reduce_scatter is not None
    own = tensor.new_empty(rows, *tensor.shape[1:])
    return Pending(own, _reduce_scatter(own, tensor, group=group, async_op=True))


def start_sum_for(rank: int, tensor: Tensor, group: Any) -> Pending:
    """In-place sum that `rank` of the group gets; elsewhere the tensor is lost."""
    if not tensor.numel():
        return Pending(tensor)
    return Pending(tensor, dist.reduce(tensor, dist.get_global_rank(group, rank), group=group, async_op=True))


def start_broadcast_from_last(tensor: Tensor, group: Any) -> Pending:
    """The last rank's tensor, contiguous, in place on every rank."""
    rank, size = rank_and_size(group)
    if size == 1 or not tensor.numel():
        return Pending(tensor)
    return Pending(tensor, dist.broadcast(tensor, dist.get_global_rank(group, size - 1), group=group, async_op=True))


def pass_rows_on(mine: Tensor | None, theirs: Tensor | None, group: Any) -> Pending:
    """Sends `mine` to the next rank and receives `theirs`, in place, from the one before; contiguous, at one time."""
    rank, _ = rank_and_size(group)
    tensors = [t for t in (mine, theirs) if t is not None and t.numel()]
    if not tensors:
        return Pending(torch.empty(0))
    staged = tensors[0].is_cuda and "nccl" not in str(dist.get_backend_config(group))  # gloo sends from the host alone
    landing = None
    moves = []
    if mine is not None:
        there = dist.get_global_rank(group, rank + 1)
        moves.append(dist.P2POp(dist.isend, mine.cpu() if staged else mine, there, group))
    if theirs is not None:
        landing = torch.empty_like(theirs, device="cpu") if staged else None
        here = dist.get_global_rank(group, rank - 1)
        moves.append(dist.P2POp(dist.irecv, theirs if landing is None else landing, here, group))
    result = tensors[0] if theirs is None else theirs
    return Pending(result, *dist.batch_isend_irecv(moves), landing=landing)


def gather_rows(tensor: Tensor, group: Any, pieces: bool = True) -> Iterator[tuple[slice, Tensor]]:
    """[n, ...] of each rank, the same n -> pieces (rows, [W * len(rows), ...]): those rows of rank 0, of rank 1, ...

    The second piece travels while the first is worked on.
    """
    rows, size = tensor.shape[0], rank_and_size(group)[1]
    cut = rows // 4 if pieces and rows * size >= PIECES_FROM else 0
    parts = [slice(0, cut), slice(cut, rows)] if cut else [slice(0, rows)]
    sent = [tensor[part].contiguous() for part in parts]  # stays as long as the collectives run
    under_way = [_start_gather(mine, group) for mine in sent]
    for part, pending in zip(parts, under_way, strict=True):
        yield part, pending.wait()


def in_rank_order(pieces: Iterator[tuple[slice, Tensor]], size: int) -> Tensor:
    """What gather_rows yields of a group of `size`, as one [W * n, ...]."""
    parts = [piece.view(size, rows.stop - rows.start, *piece.shape[1:]) for rows, piece in pieces]
    return parts[0].flatten(0, 1) if len(parts) == 1 else torch.cat(parts, 1).flatten(0, 1)


def _start_gather(mine: Tensor, group: Any) -> Pending:
    size = rank_and_size(group)[1]
    if size == 1:
        return Pending(mine)
    everyone = mine.new_empty(size * mine.shape[0], *mine.shape[1:])
    if not mine.numel():
        return Pending(everyone)
    assert _all_gather is not None
    return Pending(everyone, _all_gather(everyone.view(-1), mine.view(-1), group=group, async_op=True))


def group_device(group: Any) -> torch.device:
    """A device whose tensors the group's backend can move."""
    if group is not None and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
