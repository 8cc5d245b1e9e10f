"""What a call may ask for, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vocabshard.contract import Provenance


class LogpOutput(NamedTuple):
    """Results of a call that asked for more than the log-prob; parts not asked for are None. Shapes as target_ids."""

    logp: Tensor  # fp32 [...]
    lse: Tensor | None = None  # fp32 [...], log of the sum of exponentials, after temperature
    entropy: Tensor | None = None  # fp32 [...], nats
    logits: Tensor | None = None  # fp32 [..., V_local], before temperature, -inf in padding; not differentiable
    maximum: Tensor | None = None  # fp32 [...], the largest logit after temperature; not differentiable
    provenance: Provenance | None = None  # what ran


@dataclass(frozen=True)
class GradOptions:
    """How gradients are made. Only the defaults are available in this version; others raise by name.

    save_logits_budget: bytes the forward may keep so that the backward need not recompute (0: nothing).
    reduce: "sum" adds grad_hidden over the group with one all-reduce.
    wire_dtype: dtype of that all-reduce.
    main_grad: an fp32 buffer that grad_weight is added to instead of being returned.
    """

    save_logits_budget: int | str = 0
    reduce: str = "sum"
    wire_dtype: torch.dtype = torch.float32
    main_grad: Tensor | None = None


@dataclass(frozen=True)
class SamplingProgram:
    """An ordered list of sampling transforms that a log-prob is taken under. Not available in this version."""

    transforms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        raise NotImplementedError("SamplingProgram is not available in this version; score without `sampling`")
