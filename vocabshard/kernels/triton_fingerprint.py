"""The fingerprint of a matrix on a GPU: csrc/cpu/fingerprint.cpp says what it is. Integers, so any order of adding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, WORDS, WARPS = 4, 512, 8  # of 8 bytes; 8 words a thread and step
PROGRAMS = 2048  # at most: a few waves of any GPU


@triton.jit
def mix(x):
    """SplitMix64's output function, uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["rows", "columns", "first_row"])
def sum_words(words, sums, rows, columns, stride, first_row, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """words int64 [rows, columns] -> one sum a program."""
    total = tl.zeros((ROWS, WORDS), tl.int64)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        row_key = mix(((first_row + row) * 2).to(tl.uint64, bitcast=True))
        for start in range(0, columns, WORDS):
            column = start + tl.arange(0, WORDS)
            column_key = mix((column.to(tl.int64) * 2 + 1).to(tl.uint64, bitcast=True))
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            x = tl.load(words + row[:, None] * stride + column[None, :], mask=inside, other=0)
            x = x.to(tl.uint64, bitcast=True)
            y = x ^ (row_key[:, None] + column_key[None, :])
            h = (y & 0xFFFFFFFF) * (y >> 32) + ((x << 32) | (x >> 32))
            total += tl.where(inside, h.to(tl.int64, bitcast=True), 0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


def local_sum(words: Tensor, first_row: int) -> Tensor:
    """words int64 [rows, columns], rows contiguous -> int64 [1], modulo 2^64, without a synchronisation."""
    rows, columns = words.shape
    programs = max(1, min(PROGRAMS, triton.cdiv(rows, ROWS)))
    sums = torch.zeros(programs, dtype=torch.int64, device=words.device)
    if rows:
        sum_words[(programs,)](
            words, sums, rows, columns, words.stride(0), first_row, ROWS, WORDS, num_warps=WARPS
        )  # fmt: skip
    return sums.sum(0, keepdim=True)
