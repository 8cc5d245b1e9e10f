"""Where local kernels and the group meet: forward local -> gather -> fold, backward local -> sum over the group."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vocabshard.dist.fold import fold
from vocabshard.dist.gather import gather_tensors, sum_over_group
from vocabshard.kernels.problem import ORDINARY, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.partials import FoldedRows


@dataclass(frozen=True)
class Call:
    """Everything about a call that is not a tensor."""

    kernel: ModuleType
    backend: str
    problem: LocalProblem
    group: Any
    ignore_index: int
    real_vocab_size: int
    invalid: str
    want_logits: bool = False
    inplace_backward: bool = False

    def fold_records(self, records: Tensor, target_ids: Tensor) -> FoldedRows:
        """Gathers this rank's records and folds them; every rank ends with the same rows."""
        gathered = gather_tensors(records, self.group)
        return fold(self.backend, gathered, target_ids, self.ignore_index, self.real_vocab_size, self.invalid)

    def row_grads(
        self, target_ids: Tensor, logp: Tensor | None, lse: Tensor | None, entropy: Tensor | None
    ) -> RowGrads:
        """Upstream gradients [N] as coefficients; a row without a scored target sends none through logp."""
        zero = torch.zeros(target_ids.shape, dtype=torch.float32, device=target_ids.device)
        scored = (target_ids != self.ignore_index) & (target_ids >= 0) & (target_ids < self.real_vocab_size)
        target = zero if logp is None else torch.where(scored, logp.float(), zero)
        softmax = -target if lse is None else lse.float() - target
        return RowGrads(target, softmax.contiguous(), None if entropy is None else entropy.float().contiguous())


def _no_double_backward() -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "vocabshard has no second derivative; call backward or autograd.grad with create_graph=False"
        )


class LinearLogp(torch.autograd.Function):
    """hidden [N, D], weight [V_local, D], bias, target_ids int64 [N] -> logp, lse, entropy, logits, maximum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        inv_temperature: float | Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        records, logits = call.kernel.forward(
            hidden, weight, bias, target_ids, inv_temperature, call.problem, want_logits=call.want_logits
        )
        rows = call.fold_records(records, target_ids)
        ctx.call = call
        ctx.set_materialize_grads(False)
        per_row = inv_temperature if isinstance(inv_temperature, Tensor) else None
        ctx.inv_temperature = None if per_row is not None else inv_temperature
        ctx.save_for_backward(hidden, weight, bias, target_ids, per_row, rows.lse2_int, rows.lse2_frac, rows.entropy)
        entropy = rows.entropy if call.problem.entropy else None
        ctx.mark_non_differentiable(*(t for t in (logits, rows.maximum) if t is not None))
        return rows.logp, rows.lse, entropy, logits, rows.maximum

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _no_double_backward()
        call: Call = ctx.call
        hidden, weight, bias, target_ids, per_row, lse2_int, lse2_frac, entropy = ctx.saved_tensors
        grad_logp, grad_lse, grad_entropy = upstream[:3]
        needs = Needs(*ctx.needs_input_grad[:3])
        grad_hidden, grad_weight, grad_bias = call.kernel.backward(
            hidden,
            weight,
            bias,
            target_ids,
            ctx.inv_temperature if per_row is None else per_row,
            call.problem,
            SavedRows(lse2_int, lse2_frac, entropy),
            call.row_grads(target_ids, grad_logp, grad_lse, grad_entropy),
            needs,
            ORDINARY,
        )
        if grad_hidden is not None:
            # summed in fp32 and rounded once
            grad_hidden = sum_over_group(grad_hidden, call.group).to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class LogitsLogp(torch.autograd.Function):
    """logits [N_rows, V_local], target_ids int64 [M], rows int64 [M] or None -> logp, lse, entropy, maximum."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target_ids: Tensor,
        inv_temperature: float | Tensor | None,
        rows: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        records = call.kernel.logits_forward(logits, target_ids, inv_temperature, call.problem, rows)
        folded = call.fold_records(records, target_ids)
        ctx.call = call
        ctx.set_materialize_grads(False)
        per_row = inv_temperature if isinstance(inv_temperature, Tensor) else None
        ctx.inv_temperature = None if per_row is not None else inv_temperature
        # with inplace_backward the logits are kept outside the saved tensors: it is the caller's wish to lose them
        ctx.logits, ctx.version = (logits, logits._version) if call.inplace_backward else (None, 0)
        ctx.save_for_backward(
            None if call.inplace_backward else logits,
            target_ids,
            per_row,
            rows,
            folded.lse2_int,
            folded.lse2_frac,
            folded.entropy,
        )
        ctx.mark_non_differentiable(folded.maximum)
        return folded.logp, folded.lse, folded.entropy if call.problem.entropy else None, folded.maximum

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _no_double_backward()
        call: Call = ctx.call
        logits, target_ids, per_row, rows, lse2_int, lse2_frac, entropy = ctx.saved_tensors
        if call.inplace_backward:
            logits = ctx.logits
            if logits._version != ctx.version:
                raise RuntimeError(
                    "the logits given with inplace_backward=True were changed after the forward (by an in-place "
                    "operation, or by an earlier backward); use inplace_backward=False to run backward twice"
                )
        out = logits.detach() if call.inplace_backward else torch.empty_like(logits)
        call.kernel.logits_backward(
            logits,
            target_ids,
            ctx.inv_temperature if per_row is None else per_row,
            call.problem,
            SavedRows(lse2_int, lse2_frac, entropy),
            call.row_grads(target_ids, *upstream[:3]),
            out,
            rows,
        )
        if call.inplace_backward:
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None
