"""How the Hopper kernels see a matrix: element codes, and what the tensor copy engine (TMA) can address."""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_WIDTH = 8  # elements of 16 bytes: what the copy engine's addresses and strides are multiples of


def readable_by_tma(x: Tensor) -> bool:
    """Whether the tensor copy engine can address it as it lies."""
    return addressable(x.data_ptr(), *x.stride())


def addressable(start: int, row: int, column: int) -> bool:
    """The same of an address and the strides of rows and columns."""
    return column == 1 and row > 0 and row % _WIDTH == 0 and start % 16 == 0


def strides(x: Tensor) -> tuple[int, int]:
    """Of rows and columns; one that nothing is reached by (of a dimension of size 1) becomes a harmless one."""
    (rows, depth), (row, column) = x.shape, x.stride()
    return row if rows > 1 else -(-depth // _WIDTH) * _WIDTH, column if depth > 1 else 1


def plain_strides(x: Tensor) -> Tensor:
    """The same values, with `strides`."""
    harmless = strides(x)
    return x if x.stride() == harmless else x.as_strided(x.shape, harmless, x.storage_offset())


def for_tma(x: Tensor) -> Tensor:
    """A copy whose rows start at multiples of 16 bytes."""
    rows, depth = x.shape
    return x.new_empty(rows, -(-depth // _WIDTH) * _WIDTH)[:, :depth].copy_(x)
