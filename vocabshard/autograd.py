"""Where local kernels and the group meet: forward local -> gather -> fold, backward local -> sum over the group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabshard.dist.fold import fold
from vocabshard.dist.gather import gather_rows, gather_tensors, rank_and_size
from vocabshard.dist.grad import HiddenSum, continue_over_group
from vocabshard.kernels.problem import GradPlan, KeptLogits, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.memory import free_bytes
from vocabshard.options import GradOptions
from vocabshard.partials import FoldedRows, new_records


@dataclass
class Outcome:
    """What a call finds out as it runs, for its provenance."""

    saved_rows: int = 0
    saved_reason: str = ""


@dataclass(frozen=True)
class Call:
    """Everything about a call that is not an operand."""

    kernel: ModuleType
    backend: str
    problem: LocalProblem
    group: Any
    ignore_index: int
    real_vocab_size: int
    invalid: str
    want_logits: bool = False
    inplace_backward: bool = False
    grad: GradOptions = field(default_factory=GradOptions)
    differentiable: bool = False  # whether a backward may follow
    sequence_parallel: bool = False
    weight: Any = None  # the object that the caller gave, for Megatron's attribute
    outcome: Outcome = field(default_factory=Outcome)

    def new_kept(self, rows: int, weight: Tensor) -> KeptLogits | None:
        """A buffer for the logits of as many rows as the budget holds, or None."""
        budget = self.grad.save_logits_budget
        if not self.differentiable or budget == 0:
            return None
        size = self.kernel.kept_bytes_per_row(self.problem.valid, weight.dtype)
        kept = None
        if size == 0:
            self.outcome.saved_reason = f"backend {self.backend!r} always recomputes"
        else:
            available = free_bytes(weight.device) // 2 if budget == "auto" else int(budget)
            fitting = min(rows, available // size)
            if fitting < rows:
                self.outcome.saved_reason = f"{available} bytes hold {fitting} of {rows} rows of {size} bytes"
            try:
                kept = (
                    self.kernel.new_kept(fitting, self.problem.valid, weight.dtype, weight.device) if fitting else None
                )
            except RuntimeError as e:  # torch.OutOfMemoryError, and the CPU allocator's error which has no class
                self.outcome.saved_reason = f"{fitting * size} bytes could not be allocated: {e}"
        self.outcome.saved_rows = 0 if kept is None else kept.rows
        return kept

    def gathered_forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        inv_temperature: float | Tensor | None,
        keep: KeptLogits | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sequence parallel: from this rank's rows [n, D] the records of all N; some are worked on as others travel.

        Rows come by piece and then by rank; a row's record is the same in any batch, and is put in its place.
        """
        size, own = rank_and_size(self.group)[1], hidden.shape[0]
        records = new_records(size * own, self.problem.entropy, hidden.device)
        placed, logits = records.view(-1, size, own), None
        # what has all rows in order comes from one call
        for rows, piece in gather_rows(hidden, self.group, pieces=keep is None and not self.want_logits):

            def of_piece(x: Tensor, rows: slice = rows) -> Tensor:
                return x.view(size, own)[:, rows].reshape(-1)

            scale = of_piece(inv_temperature) if isinstance(inv_temperature, Tensor) else inv_temperature
            part, logits = self.kernel.forward(
                piece, weight, bias, of_piece(target_ids), scale, self.problem, want_logits=self.want_logits, keep=keep
            )
            placed[:, :, rows] = part.view(-1, size, rows.stop - rows.start)
        return records, logits

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
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        keep = call.new_kept(target_ids.shape[0], weight)
        if call.sequence_parallel:
            records, logits = call.gathered_forward(hidden, weight, bias, target_ids, inv_temperature, keep)
        else:
            records, logits = call.kernel.forward(
                hidden, weight, bias, target_ids, inv_temperature, call.problem, want_logits=call.want_logits, keep=keep
            )
        rows = call.fold_records(records, target_ids)
        ctx.call = call
        ctx.set_materialize_grads(False)
        per_row = inv_temperature if isinstance(inv_temperature, Tensor) else None
        ctx.inv_temperature = None if per_row is not None else inv_temperature
        saved = (rows.lse2_int, rows.lse2_frac, rows.entropy)
        kept = () if keep is None else keep.tensors
        ctx.save_for_backward(hidden, weight, bias, target_ids, per_row, *saved, *kept)
        entropy = rows.entropy if call.problem.entropy else None
        ctx.mark_non_differentiable(*(t for t in (logits, rows.maximum) if t is not None))
        return rows.logp, rows.lse, entropy, logits, rows.maximum

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _no_double_backward()
        call: Call = ctx.call
        hidden, weight, bias, target_ids, per_row, lse2_int, lse2_frac, entropy, *kept = ctx.saved_tensors
        if call.sequence_parallel:
            ((_, hidden),) = gather_rows(hidden, call.group, pieces=False)
        run = _LocalBackward(
            call,
            hidden,
            weight,
            bias,
            target_ids,
            ctx.inv_temperature if per_row is None else per_row,
            SavedRows(lse2_int, lse2_frac, entropy),
            call.row_grads(target_ids, *upstream[:3]),
            KeptLogits(tuple(kept)) if kept else None,
        )
        needs = Needs(*ctx.needs_input_grad[:3])
        ordered = call.grad.reduce == "ordered" and needs.hidden
        grad_hidden, grad_weight, grad_bias = run.ordered(needs) if ordered else run.summed(needs)
        if needs.weight and call.grad.main_grad is not None:
            torch.autograd.graph.increment_version(call.grad.main_grad)
            if hasattr(call.weight, "grad_added_to_main_grad"):
                call.weight.grad_added_to_main_grad = True
                grad_weight = torch.zeros_like(weight)
        # in fp32 until here, and rounded once
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _LocalBackward(NamedTuple):
    """The operands of a backward, all N rows; grad_hidden comes back as this rank shall have it, not yet rounded."""

    call: Call
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target_ids: Tensor
    inv_temperature: float | Tensor | None
    saved: SavedRows
    grads: RowGrads
    kept: KeptLogits | None

    def on(self, rows: slice, needs: Needs, how: GradPlan) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The kernel's backward of those rows alone."""

        def part(x: Any) -> Any:
            return x[rows] if isinstance(x, Tensor) else x

        if self.kept is not None:
            how = replace(how, kept=self.kept.part(rows.start, rows.stop))
        return self.call.kernel.backward(
            self.hidden[rows],
            self.weight,
            self.bias,
            self.target_ids[rows],
            part(self.inv_temperature),
            self.call.problem,
            SavedRows(*map(part, self.saved)),
            RowGrads(*map(part, self.grads)),
            needs,
            how,
        )

    @property
    def every_row(self) -> slice:
        return slice(0, self.hidden.shape[0])

    def summed(self, needs: Needs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Every rank's columns at a time; the last products for grad_weight hide the sum of grad_hidden."""
        call = self.call
        total = HiddenSum(call.group, call.grad.wire_dtype, call.sequence_parallel)
        how = GradPlan(call.grad.main_grad, hidden_ready=total.start if needs.hidden else None)
        _, grad_weight, grad_bias = self.on(self.every_row, needs, how)
        return total.result() if needs.hidden else None, grad_weight, grad_bias

    def ordered(self, needs: Needs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Rank after rank in each chunk of rows; the pass for grad_weight hides the last rank's answer."""
        call, grad_weight, grad_bias = self.call, None, None
        accumulators = torch.zeros(self.hidden.shape, dtype=torch.float32, device=self.hidden.device)

        def add(rows: slice) -> None:
            self.on(rows, Needs(True, False, False), GradPlan(grad_hidden=accumulators[rows]))

        everywhere = continue_over_group(accumulators, add, call.group)
        if needs.weight or needs.bias:
            alone = Needs(False, needs.weight, needs.bias)
            _, grad_weight, grad_bias = self.on(self.every_row, alone, GradPlan(call.grad.main_grad))
        grad_hidden = everywhere.wait()
        if call.sequence_parallel:
            rank, size = rank_and_size(call.group)
            own = grad_hidden.shape[0] // size
            grad_hidden = grad_hidden[rank * own : (rank + 1) * own]
        return grad_hidden, grad_weight, grad_bias


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
