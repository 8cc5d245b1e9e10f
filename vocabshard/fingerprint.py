"""Which version of a head scored: a fingerprint of a sharded weight that does not depend on the sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocabshard.contract import digest
from vocabshard.dist import agree
from vocabshard.dist.gather import gather_objects, gather_tensors, group_device
from vocabshard.kernels.fingerprint import local_sum
from vocabshard.shard import VocabShard
from vocabshard.strict import DTYPE_NAMES

FORMAT = "weight-1"


def weight_fingerprint(weight: Tensor, shard: VocabShard | None = None) -> str:
    """32 hexadecimal digits of a head's bytes, the same on every rank, for any W, sharding, padding, strides, device.

    Args:
        weight: [V_local, D], this rank's rows, or a bias [V_local]; fp32, bf16 or fp16, on a CPU or a GPU. A DTensor
            with Shard(0) brings its own shard.
        shard: which rows they are; None is this process alone, all rows real. Padding rows do not count.

    Every bit counts: -0 is another weight than +0, and one NaN than another. It reads the weight once (exact integers
    keyed by global row and column, so that parts add up in any order; not a cryptographic hash) and synchronises.

    Collective over the shard's group: one all-gather of 8 bytes a rank, after those by which the ranks agree.
    Raises: TypeError, ValueError on every rank for a tensor that is no such weight, not of its shard's size, or of
    another dtype or width than another rank's.
    """
    if isinstance(weight, Tensor) and hasattr(weight, "to_local"):
        shard = VocabShard.of_dtensor(weight) if shard is None else shard
        weight = weight.to_local()
    group = None if shard is None else shard.group
    error: Exception | None = None
    try:
        _check(weight, shard)
    except (TypeError, ValueError) as e:
        error = e
    agree.raise_together(error, group)
    rows = weight.detach().resolve_neg()
    rows = rows[:, None] if rows.dim() == 1 else rows
    alike = {"dtype": DTYPE_NAMES[rows.dtype], "columns": rows.shape[1]}
    agree.compare(gather_objects(alike, group), "give every rank its rows of one weight")
    first, valid, real = (
        (0, len(rows), len(rows)) if shard is None else (shard.start, shard.valid, shard.real_vocab_size)
    )
    mine = local_sum(rows[:valid], first)
    total = int(gather_tensors(mine.to(_carried_by(group, mine.device)), group).sum()) & (2**64 - 1)
    described = {"format": FORMAT, "dtype": DTYPE_NAMES[rows.dtype], "shape": [real, rows.shape[1]], "sum": total}
    return digest(described)


def _carried_by(group: Any, device: torch.device) -> torch.device:
    return device if group is None else group_device(group)


def _check(weight: Tensor, shard: VocabShard | None) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a torch.Tensor, got {type(weight).__name__}")
    if weight.dtype not in DTYPE_NAMES:
        raise TypeError(f"weight must be one of {', '.join(DTYPE_NAMES.values())}, got {weight.dtype}")
    if weight.dim() not in (1, 2):
        raise ValueError(f"weight must be [V_local, D], or a bias [V_local], got {list(weight.shape)}")
    if weight.is_meta:
        raise ValueError("weight is on the meta device and holds no data; materialise it first")
    if shard is not None and weight.shape[0] != shard.size:
        raise ValueError(f"this rank's shard has {shard.size} rows, got {weight.shape[0]}")
