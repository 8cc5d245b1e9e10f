"""What a local kernel is given besides its tensors, and what it gives back. N rows, D hidden size, V_local columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class LocalProblem:
    """One rank's share of the vocabulary, as a kernel sees it."""

    vocab_start: int  # global id of local column 0
    valid: int  # leading columns that are real vocabulary; the rest is padding, excluded by selection
    softcap: float | None
    entropy: bool


class SavedRows(NamedTuple):
    """What the fold keeps of each row for the backward: lse * log2(e) = lse2_int + lse2_frac."""

    lse2_int: Tensor  # int32 [N]
    lse2_frac: Tensor  # fp32 [N], NaN in a poisoned row
    entropy: Tensor | None  # fp32 [N]


class RowGrads(NamedTuple):
    """Upstream gradients as coefficients of dy = target * onehot + p * (softmax - entropy * (log p + H))."""

    target: Tensor  # fp32 [N]
    softmax: Tensor  # fp32 [N]
    entropy: Tensor | None  # fp32 [N]


class Needs(NamedTuple):
    """Which gradients are wanted; what is not wanted costs nothing."""

    hidden: bool
    weight: bool
    bias: bool
