"""The record of a row and rank: what a local kernel leaves and the ranks exchange.

records: int64 [R, N], rows contiguous, R = 4, or 7 with entropy.
  word 0      low half: bits of y_max (fp32); high half: bits of the target's y (NaN: not in this shard)
  words 1..3  counters of the sum of exponentials at limb positions J, J-1, J-2
  words 4..6  counters of the entropy sum at J_U, J_U-1, J_U-2
J and J_U follow from y_max (csrc/contract.h). y_max = -inf is the identity, NaN or above 2^20 a poisoned row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vocabshard.contract import NAN_BITS, RECORD_WORDS, RECORD_WORDS_ENTROPY

NEG_INF_BITS = 0xFF800000


class FoldedRows(NamedTuple):
    """Results of the fold, [N] each."""

    logp: Tensor  # fp32
    lse: Tensor  # fp32
    entropy: Tensor | None  # fp32
    lse2_int: Tensor  # int32
    lse2_frac: Tensor  # fp32
    maximum: Tensor  # fp32, the largest y


class Scores(NamedTuple):
    """Those of them that a call without a backward returns."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor | None


def record_words(entropy: bool) -> int:
    """R, the number of words of a record."""
    return RECORD_WORDS_ENTROPY if entropy else RECORD_WORDS


def new_records(rows: int, entropy: bool, device: torch.device) -> Tensor:
    """Uninitialised int64 [R, rows]."""
    return torch.empty(record_words(entropy), rows, dtype=torch.int64, device=device)


def identity_records(rows: int, entropy: bool, device: torch.device) -> Tensor:
    """Records of an empty shard, int64 [R, rows]."""
    records = torch.zeros(record_words(entropy), rows, dtype=torch.int64, device=device)
    word = (NAN_BITS << 32) | NEG_INF_BITS
    records[0] = word
    return records


def maxima(records: Tensor) -> Tensor:
    """y_max of each row, fp32, from records [..., R, N]."""
    return records[..., 0, :].contiguous().view(torch.float32)[..., 0::2]


def target_logits(records: Tensor) -> Tensor:
    """y of the target of each row, fp32 (NaN: not in this shard), from records [..., R, N]."""
    return records[..., 0, :].contiguous().view(torch.float32)[..., 1::2]
