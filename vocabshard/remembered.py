"""Plans of calls that looked the same before: with few rows, planning would cost more than the kernel.

Only of calls whose plan depends on shapes, dtypes, devices and options, and not on values. A call that finds its plan
communicates as one that makes it would: with a group, plans are kept by the VocabShard that the call names, and only
once the ranks have agreed on it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from vocabshard import checks
from vocabshard.options import GradOptions
from vocabshard.passes import Outcome
from vocabshard.plan import Plan
from vocabshard.sampling import SamplingProgram
from vocabshard.shard import VocabShard

_MOST = 256
_PLAIN = (Tensor, torch.nn.Parameter)
_plans: dict[Hashable, Plan] = {}


class Key(NamedTuple):
    """Under which a plan is kept, and where."""

    of: Hashable
    plans: dict[Hashable, Plan]
    shard: VocabShard | None  # whose plans they are


def key_of(
    tensors: tuple[Tensor | None, ...],
    options: tuple[Hashable, ...],
    shard: VocabShard | None = None,
    grad: GradOptions | None = None,
) -> Key | None:
    """What the plan of a call over these tensors depends on, or None where it depends on more.

    options: numbers, texts, programs and None; their types count, so that True is not 1.
    """
    if grad is not None:
        if type(grad) is not GradOptions or grad.main_grad is not None:
            return None
        options = (*options, grad.save_logits_budget, grad.reduce, repr(grad.wire_dtype))
    looks: list[Hashable] = []
    for tensor in tensors:
        if tensor is None:
            looks.append(None)
            continue
        if type(tensor) not in _PLAIN or tensor.is_nested or checks.address(tensor) == 0 or tensor.is_neg():
            return None
        looks.append((tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad))
    if shard is None:
        plans = _plans
    elif type(shard) is VocabShard:
        plans = shard.plans
    else:
        return None
    kinds = tuple(map(type, options))
    if not _KINDS.issuperset(kinds):
        return None
    return Key((*looks, torch.is_grad_enabled(), options, kinds), plans, shard)


_KINDS = frozenset((type(None), bool, int, float, str, SamplingProgram))


def recall(key: Key | None, target_ids: Tensor | None) -> Plan | None:
    """The plan of a call that was remembered, for these targets; None where tokens are drawn: it then has none."""
    known = None if key is None else key.plans.get(key.of)
    if key is None or known is None:
        return None
    shard = known.shard if key.shard is None else key.shard
    if target_ids is None:
        target_ids = known.target_ids
    elif target_ids.dtype != torch.int64 or target_ids.dim() != 1 or not target_ids.is_contiguous():
        target_ids = target_ids.reshape(-1).to(torch.int64).contiguous()
    call = known.call
    if call.grad.save_logits_budget != 0:
        call = replace(call, outcome=Outcome())  # what a call keeps is its own to tell
    return Plan(
        call, shard, known.choice, known.inv_temperature, target_ids, known.dtypes, known.outputs, known.cut,
        known.sampling_kernels, by_looks=True,
    )  # fmt: skip


def remember(key: Key | None, plan: Plan) -> None:
    """For calls to come that have this key."""
    if key is None or not plan.by_looks:
        return
    if len(key.plans) >= _MOST:
        key.plans.clear()
    kept = plan.without_tensors()
    if key.shard is not None:
        # A circle would keep the shard's group past destroy_process_group, and that can abort a process at its exit.
        kept = kept._replace(shard=cast(VocabShard, None))
    key.plans[key.of] = kept
