"""Every collective of the library. Nothing else names one.

All results are in group-rank order and do not depend on how the collective is carried out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


# newer torch renames it, and warns of the old name
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


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


def group_device(group: Any) -> torch.device:
    """A device whose tensors the group's backend can move."""
    if group is not None and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
