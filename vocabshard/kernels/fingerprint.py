"""This rank's part of a weight's fingerprint: an integer that adds up over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

_STEP_BYTES = 1 << 26  # what is copied at a time where words cannot be read as they lie


def local_sum(rows: Tensor, first_row: int) -> Tensor:
    """rows [R, D] of any dtype, the first of them global row `first_row` -> int64 [1] on their device."""
    if rows.device.type == "cpu":
        return _cpu_sum(rows, first_row)
    total = torch.zeros(1, dtype=torch.int64, device=rows.device)
    from vocabshard.kernels import triton_fingerprint

    with torch.cuda.device(rows.device):
        for start, words in _as_words(rows):
            total += triton_fingerprint.local_sum(words, first_row + start)
    return total


def _cpu_sum(rows: Tensor, first_row: int) -> Tensor:
    from vocabshard import _C

    size = rows.element_size()
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        rows = rows.contiguous()
    total = _C.cpu_fingerprint(
        rows.data_ptr(), rows.shape[0], rows.shape[1] * size, rows.stride(0) * size, first_row, torch.get_num_threads()
    )
    return torch.tensor([total - (total >> 63 << 64)], dtype=torch.int64)


def _as_words(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(index of the first row, int64 [some rows, ceil(row bytes / 8)]); rows are filled up with zeros."""
    per_word = 8 // rows.element_size()
    fits = rows.shape[1] % per_word == 0 and rows.stride(0) % per_word == 0 and rows.data_ptr() % 8 == 0
    if fits and rows.stride(1) == 1 and rows.stride(0) > 0:
        yield 0, rows.view(torch.int64)
        return
    step = max(1, _STEP_BYTES // max(1, rows.shape[1] * rows.element_size()))
    for start in range(0, rows.shape[0], step):
        piece = F.pad(rows[start : start + step], (0, -rows.shape[1] % per_word)).contiguous()
        yield start, piece.view(torch.int64)
