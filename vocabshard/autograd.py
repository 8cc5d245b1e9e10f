"""The passes of a call (passes.py) as functions that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocabshard.kernels.problem import KeptLogits, Needs, SavedRows, Upstream
from vocabshard.passes import Call, LinearOperands, linear_backward, linear_forward


def _no_double_backward() -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "vocabshard has no second derivative; call backward or autograd.grad with create_graph=False"
        )


def _runs_again() -> bool:
    """Whether the backward under way keeps its graph, so that it may run again; yes where torch doesn't say."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


class LinearLogp(torch.autograd.Function):
    """hidden [N, D], weight [V_local, D], bias, target_ids int64 [N] -> logp, lse, entropy, logits, maximum.

    Sequence parallel, hidden and its gradient are this rank's [N / W, D].
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        inv_temperature: float | Tensor | None,
        cut: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """Local kernel, gather, fold; keeps what the backward needs."""
        x = LinearOperands(hidden, weight, bias, target_ids, inv_temperature, cut)
        rows, logits, kept = linear_forward(call, x)
        ctx.call = call
        ctx.set_materialize_grads(False)
        per_row = inv_temperature if isinstance(inv_temperature, Tensor) else None
        ctx.inv_temperature = None if per_row is not None else inv_temperature
        saved = (rows.lse2_int, rows.lse2_frac, rows.entropy)
        ctx.save_for_backward(hidden, weight, bias, target_ids, per_row, cut, *saved, *(kept.tensors if kept else ()))
        entropy = rows.entropy if call.problem.entropy else None
        ctx.mark_non_differentiable(*(t for t in (logits, rows.maximum) if t is not None))
        return rows.logp, rows.lse, entropy, logits, rows.maximum

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden (summed over the group), weight and bias."""
        _no_double_backward()
        hidden, weight, bias, target_ids, per_row, cut, lse2_int, lse2_frac, entropy, *kept = ctx.saved_tensors
        inv_temperature = ctx.inv_temperature if per_row is None else per_row
        gradients = linear_backward(
            ctx.call,
            LinearOperands(hidden, weight, bias, target_ids, inv_temperature, cut),
            SavedRows(lse2_int, lse2_frac, entropy),
            (upstream[0], upstream[1], upstream[2]),
            KeptLogits(tuple(kept)) if kept else None,
            Needs(*ctx.needs_input_grad[:3]),
            last_use=bool(kept) and not _runs_again(),
        )
        return *gradients, None, None, None, None


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
        """Local kernel, gather, fold; keeps what the backward needs."""
        folded = call.fold_logits(logits, target_ids, inv_temperature, rows)
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
        """The gradient of this rank's logits."""
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
        scale = ctx.inv_temperature if per_row is None else per_row
        saved = SavedRows(lse2_int, lse2_frac, entropy)
        if hasattr(call.kernel, "logits_backward_upstream"):
            call.kernel.logits_backward_upstream(
                logits, target_ids, scale, call.problem, saved, Upstream(*upstream[:3]), out, rows,
                call.ignore_index, call.real_vocab_size,
            )  # fmt: skip
        else:
            grads = call.row_grads(target_ids, *upstream[:3])
            call.kernel.logits_backward(logits, target_ids, scale, call.problem, saved, grads, out, rows)
        if call.inplace_backward:
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None
