"""Plans of calls over logits that looked the same before: with few rows, planning would cost more than the kernel.

Only of calls by one process alone, on a GPU, whose plan depends on shapes, dtypes, device and options, not on values.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from vocabshard import checks
from vocabshard.plan import Plan

_MOST = 256
_plans: dict[Hashable, Plan] = {}


def key_of(logits: Tensor, target_ids: Tensor, options: tuple[Hashable, ...]) -> Hashable | None:
    """What the plan of such a call depends on, or None where it depends on more, a tensor among the options say."""
    if type(logits) is not Tensor or type(target_ids) is not Tensor or not logits.is_cuda or logits.is_nested:
        return None
    if checks.address(logits) == 0 or checks.address(target_ids) == 0:
        return None
    for option in options:
        if option is not None and not isinstance(option, (int, float, str)):
            return None
    return (
        logits.shape,
        logits.dtype,
        logits.device,
        logits.layout,
        logits.requires_grad and torch.is_grad_enabled(),
        target_ids.shape,
        target_ids.dtype,
        target_ids.device,
        target_ids.layout,
        options,
    )


def recall(key: Hashable | None, target_ids: Tensor) -> Plan | None:
    """The plan of a call that was remembered, for these targets."""
    known = None if key is None else _plans.get(key)
    if known is None:
        return None
    if target_ids.dtype != torch.int64 or target_ids.dim() != 1 or not target_ids.is_contiguous():
        target_ids = target_ids.reshape(-1).to(torch.int64).contiguous()
    return Plan(known.call, known.shard, known.choice, known.inv_temperature, target_ids, known.dtypes)


def remember(key: Hashable | None, plan: Plan) -> None:
    """For calls to come that have this key."""
    if key is None or plan.call.group is not None or plan.call.backend == "torch":
        return
    if len(_plans) >= _MOST:
        _plans.clear()
    _plans[key] = plan._replace(target_ids=plan.target_ids[:0].clone())
