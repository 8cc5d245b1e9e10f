"""Truncations for kernel modules that have none of their own: logits in bounded blocks, cut, and into their kernels.

A module takes cut= by itself in those of its functions that `TAKES_CUT` names.
cut is int64 [N] (vocabshard/sampling.py); columns that it leaves out count as logits of -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vocabshard.kernels.blockwise import active_rows, add_library_product, without_autocast
from vocabshard.kernels.problem import ORDINARY, GradPlan, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.partials import new_records
from vocabshard.sampling import left_out

LOGITS_BYTES = 1 << 28  # of the fp32 logits of a block


def takes_cut(kernel: ModuleType, function: str) -> bool:
    """Whether that function of the module truncates by itself."""
    return function in getattr(kernel, "TAKES_CUT", ())


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """As many rows at a time as keep fp32 logits of that width within LOGITS_BYTES."""
    step = max(1, LOGITS_BYTES // (4 * max(1, columns)))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _part(x: Any, rows: slice) -> Any:
    return x[rows] if isinstance(x, Tensor) else x


def without_cut(logits: Tensor, problem: LocalProblem, cut: Tensor) -> Tensor:
    """A copy in which the columns that are left out are -inf."""
    return logits.masked_fill(left_out(logits, problem.vocab_start, cut), float("-inf"))


def logits_forward(
    kernel: ModuleType,
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    cut: Tensor | None,
) -> Tensor:
    """Records int64 [R, N] of logits that exist, soft-cap and all, under a cut."""
    problem = replace(problem, softcap=None)
    if cut is None:
        return kernel.logits_forward(logits, target_ids, inv_temperature, problem)
    if takes_cut(kernel, "logits_forward"):
        return kernel.logits_forward(logits, target_ids, inv_temperature, problem, cut=cut)
    return kernel.logits_forward(without_cut(logits, problem, cut), target_ids, inv_temperature, problem)


def forward(
    kernel: ModuleType,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    *,
    cut: Tensor,
    want_logits: bool = False,
    **keep: Any,
) -> tuple[Tensor, Tensor | None]:
    """The kernel interface's forward under a cut; wanted logits are those before it."""
    if takes_cut(kernel, "forward"):
        return kernel.forward(
            hidden, weight, bias, target_ids, inv_temperature, problem, want_logits=want_logits, cut=cut, **keep
        )
    records, logits = [], []
    for rows in row_blocks(hidden.shape[0], weight.shape[0]):
        scale = _part(inv_temperature, rows)
        _, z = kernel.forward(hidden[rows], weight, bias, target_ids[rows], scale, problem, want_logits=True)
        records.append(logits_forward(kernel, z, target_ids[rows], scale, problem, cut[rows]))
        if want_logits:
            logits.append(z)
    if not records:
        empty = hidden.new_empty(0, weight.shape[0], dtype=torch.float32)
        return new_records(0, problem.entropy, hidden.device), empty if want_logits else None
    return torch.cat(records, 1), torch.cat(logits) if want_logits else None


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    grads: RowGrads,
    needs: Needs,
    how: GradPlan = ORDINARY,
    *,
    kernel: ModuleType,
    cut: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The kernel interface's backward under a cut."""
    x = (hidden, weight, bias, target_ids, inv_temperature, problem, saved, grads, needs, how)
    if takes_cut(kernel, "backward"):
        return kernel.backward(*x, cut=cut)
    return backward_by_blocks(*x, kernel=kernel, cut=cut)


@without_autocast
def backward_by_blocks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    grads: RowGrads,
    needs: Needs,
    how: GradPlan = ORDINARY,
    *,
    kernel: ModuleType,
    cut: Tensor,
    add_product: Callable[[Tensor, Tensor, Tensor], None] = add_library_product,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same over blocks of logits. A block's gradient of the logits is rounded to the operands' dtype for the
    products; sums are fp32, in the order of `add_product`'s (kernels/blockwise.py)."""
    given, valid = replace(problem, softcap=None), problem.valid
    active = active_rows(grads)
    grad_hidden = how.grad_hidden
    if needs.hidden and grad_hidden is None:
        grad_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32)
    grad_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if needs.weight else None
    grad_bias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if needs.bias and bias is not None else None
    for rows in row_blocks(hidden.shape[0], weight.shape[0]):
        scale = _part(inv_temperature, rows)
        _, z = kernel.forward(hidden[rows], weight, bias, target_ids[rows], scale, problem, want_logits=True)
        dz = without_cut(z, problem, cut[rows])
        of_rows = (SavedRows(*(_part(x, rows) for x in saved)), RowGrads(*(_part(x, rows) for x in grads)))
        kernel.logits_backward(dz, target_ids[rows], scale, given, *of_rows, dz)
        dz, z = dz[:, :valid], z[:, :valid]  # padding rows must not be multiplied, not even by 0
        if problem.softcap is not None:
            dz = dz * torch.where(torch.isfinite(z), 1 - (z / problem.softcap).square(), 0.0)
        if grad_bias is not None:
            grad_bias[:valid] += dz.sum(0)
        dz = dz.to(hidden.dtype)
        if grad_hidden is not None:
            add_product(grad_hidden[rows], dz, weight[:valid])
        if grad_weight is not None:
            nothing = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
            add_product(grad_weight[:valid], dz.t(), torch.where(active[rows, None], hidden[rows], nothing))
    if grad_hidden is not None:
        how.announce(grad_hidden)
    if grad_weight is not None and how.main_grad is not None:
        how.main_grad.add_(grad_weight)
        grad_weight = None
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )
