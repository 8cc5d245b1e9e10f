"""How the Hopper kernels see a matrix: element codes, and what the tensor copy engine (TMA) can address."""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_WIDTH = 8  # elements of 16 bytes: what the copy engine's addresses and strides are multiples of


def readable_by_tma(x: Tensor) -> bool:
    """Whether the tensor copy engine can address it as it lies."""
    row, column = x.stride()
    return column == 1 and row > 0 and row % _WIDTH == 0 and x.data_ptr() % 16 == 0


def plain_strides(x: Tensor) -> Tensor:
    """The same values; a stride that nothing is reached by (a dimension of size 1) becomes a harmless one."""
    rows, depth = x.shape
    row, column = x.stride()
    if rows > 1 and depth > 1:
        return x
    column = column if depth > 1 else 1
    row = row if rows > 1 else -(-depth // _WIDTH) * _WIDTH
    return x if x.stride() == (row, column) else x.as_strided(x.shape, (row, column), x.storage_offset())


def for_tma(x: Tensor) -> Tensor:
    """A copy whose rows start at multiples of 16 bytes."""
    rows, depth = x.shape
    return x.new_empty(rows, -(-depth // _WIDTH) * _WIDTH)[:, :depth].copy_(x)
