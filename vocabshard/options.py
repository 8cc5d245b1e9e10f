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
    cut: Tensor | None = None  # int64 [...], what a truncation kept: vocabshard.sampling.cut_parts reads it
    top_ids: Tensor | None = None  # int64 [..., n], the best columns, larger logits and then lower ids first
    top_logp: Tensor | None = None  # fp32 [..., n], -inf where a truncation left the column out
    target_rank: Tensor | None = None  # int64 [...], the target's place among all columns, from 1


class SampleOutput(NamedTuple):
    """Drawn tokens and what was scored with them; parts not asked for are None. Shapes as hidden without D."""

    token: Tensor  # int64 [...], -1 in a row without a distribution (NaN, all -inf)
    logp: Tensor  # fp32 [...], the bytes of linear_logp(..., token, sampling=program, cut=cut)
    cut: Tensor  # int64 [...]: what the program kept
    lse: Tensor | None = None  # fp32 [...], of what was kept
    entropy: Tensor | None = None  # fp32 [...], of the truncated distribution, nats
    top_ids: Tensor | None = None  # as in LogpOutput
    top_logp: Tensor | None = None
    token_rank: Tensor | None = None
    provenance: Provenance | None = None


@dataclass(frozen=True)
class GradOptions:
    """How gradients are made, and how they come together over the group. Never changes logp, lse or entropy.

    save_logits_budget: bytes of this rank that the forward may keep logits in, so that the backward makes them again
        only for the rows that did not fit. 0: none. "auto": half of the device memory that is free at the forward.
        What was kept is in LogpOutput.provenance (saved_rows, saved_reason).
    reduce: "sum" adds grad_hidden over the group with one collective, in the collective's order. "ordered": one
        ascending fp32 chain over the whole vocabulary, each rank going on from the accumulators of the one before:
        the same bytes for any number of ranks, at the cost of another product and of a pipeline that has to fill.
    wire_dtype: what "sum" sends and adds in, torch.float32 or torch.bfloat16.
    main_grad: fp32 [V_local, D] that grad_weight is added to in place; no gradient is then returned for weight. Where
        weight has an attribute grad_added_to_main_grad (Megatron's), it becomes True and a gradient of zeros is
        returned, so that hooks run.
    """

    save_logits_budget: int | str = 0
    reduce: str = "sum"
    wire_dtype: torch.dtype = torch.float32
    main_grad: Tensor | None = None
