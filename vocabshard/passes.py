"""The two passes of a call on one rank, without autograd: local kernels and the group meet here.

Forward: local -> gather -> fold. Backward: local -> sum over the group, or one rank after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabshard.contract import Provenance
from vocabshard.dist.fold import fold
from vocabshard.dist.gather import gather_rows, gather_tensors, in_rank_order, rank_and_size
from vocabshard.dist.grad import HiddenSum, continue_over_group
from vocabshard.kernels import truncated
from vocabshard.kernels.problem import GradPlan, KeptLogits, LocalProblem, Needs, RowGrads, SavedRows, Upstream
from vocabshard.memory import free_bytes
from vocabshard.options import GradOptions
from vocabshard.partials import FoldedRows, new_records
from vocabshard.sampling import SamplingProgram

_ALONE = GradPlan(rounded_hidden=True)
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight, bias


@dataclass
class Outcome:
    """What a call finds out as it runs, for its provenance."""

    saved_rows: int = 0
    saved_reason: str = ""
    told: tuple[float | str | None, Provenance] | None = None  # beside the temperature, which may be a tensor's number


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
    sampling: SamplingProgram | None = None
    topk: int | None = None
    widest: int = 0  # columns of the group's widest shard

    def new_kept(self, x: LinearOperands) -> KeptLogits | None:
        """A buffer for the logits of as many rows as the budget holds, or None."""
        budget, rows, weight = self.grad.save_logits_budget, x.target_ids.shape[0], x.weight
        if not self.differentiable or budget == 0:
            return None
        size = self.kernel.kept_bytes_per_row(self.problem.valid, weight.dtype)
        kept = None
        refused = getattr(self.kernel, "why_not_kept", None)
        if x.cut is not None and not truncated.takes_cut(self.kernel, "backward"):
            self.outcome.saved_reason = f"backend {self.backend!r} always recomputes under a truncation"
        elif refusal := refused(x.hidden, weight, self.problem) if refused else "":
            self.outcome.saved_reason = refusal
        elif size == 0:
            self.outcome.saved_reason = f"backend {self.backend!r} always recomputes"
        else:
            available = free_bytes(weight.device) // 2 if budget == "auto" else int(budget)
            fitting, step = min(rows, available // size), getattr(self.kernel, "KEPT_ROWS", 1)
            if fitting < rows:
                fitting -= fitting % step
                self.outcome.saved_reason = f"{available} bytes hold {fitting} of {rows} rows of {size} bytes"
            try:
                kept = (
                    self.kernel.new_kept(fitting, self.problem.valid, weight.dtype, weight.device) if fitting else None
                )
            except RuntimeError as e:  # torch.OutOfMemoryError, and the CPU allocator's error which has no class
                self.outcome.saved_reason = f"{fitting * size} bytes could not be allocated: {e}"
        self.outcome.saved_rows = 0 if kept is None else kept.rows
        return kept

    def local_forward(self, x: LinearOperands, **options: Any) -> tuple[Tensor, Tensor | None]:
        """This rank's records, and its logits where wanted."""
        if x.cut is None:
            return self.kernel.forward(*x[:5], self.problem, **options)
        return truncated.forward(self.kernel, *x[:5], self.problem, cut=x.cut, **options)

    def fold_records(self, records: Tensor, target_ids: Tensor) -> FoldedRows:
        """Gathers this rank's records and folds them; every rank ends with the same rows."""
        gathered = gather_tensors(records, self.group)
        return fold(self.backend, gathered, target_ids, self.ignore_index, self.real_vocab_size, self.invalid)

    def fold_logits(
        self, logits: Tensor, target_ids: Tensor, inv_temperature: float | Tensor | None, rows: Tensor | None
    ) -> FoldedRows:
        """From logits to folded rows: in one launch where there is no group and the kernels have it."""
        if self.group is None and hasattr(self.kernel, "logits_rows"):
            return self.kernel.logits_rows(
                logits, target_ids, inv_temperature, self.problem, rows,
                self.ignore_index, self.real_vocab_size, self.invalid,
            )  # fmt: skip
        records = self.kernel.logits_forward(logits, target_ids, inv_temperature, self.problem, rows)
        return self.fold_records(records, target_ids)

    def score_logits(
        self,
        logits: Tensor,
        target_ids: Tensor,
        inv_temperature: float | Tensor | None,
        rows: Tensor | None,
        want_lse: bool,
        want_maximum: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """logp, lse, entropy and maximum with no backward to come; what is not wanted may be None."""
        if self.group is None and hasattr(self.kernel, "logits_scores"):
            return self.kernel.logits_scores(
                logits, target_ids, inv_temperature, self.problem, rows,
                self.ignore_index, self.real_vocab_size, self.invalid, want_lse, want_maximum,
            )  # fmt: skip
        folded = self.fold_logits(logits, target_ids, inv_temperature, rows)
        return folded.logp, folded.lse, folded.entropy if self.problem.entropy else None, folded.maximum

    def row_grads(
        self, target_ids: Tensor, logp: Tensor | None, lse: Tensor | None, entropy: Tensor | None
    ) -> RowGrads:
        """Upstream gradients [N] as coefficients; a row without a scored target sends none through logp."""
        if hasattr(self.kernel, "row_grads"):
            upstream = Upstream(logp, lse, entropy)
            return self.kernel.row_grads(upstream, target_ids, self.ignore_index, self.real_vocab_size)
        zero = torch.zeros(target_ids.shape, dtype=torch.float32, device=target_ids.device)
        scored = (target_ids != self.ignore_index) & (target_ids >= 0) & (target_ids < self.real_vocab_size)
        target = zero if logp is None else torch.where(scored, logp.float(), zero)
        softmax = -target if lse is None else lse.float() - target
        return RowGrads(target, softmax.contiguous(), None if entropy is None else entropy.float().contiguous())


class LinearOperands(NamedTuple):
    """What both passes of linear_logp read. Sequence parallel, hidden is this rank's [N / W, D]."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V_local, D]
    bias: Tensor | None
    target_ids: Tensor  # int64 [N]
    inv_temperature: float | Tensor | None
    cut: Tensor | None = None  # int64 [N]: what a truncation keeps


def linear_forward(call: Call, x: LinearOperands) -> tuple[FoldedRows, Tensor | None, KeptLogits | None]:
    """The folded rows, this rank's logits where wanted, and what is kept for the backward."""
    kept = call.new_kept(x)
    keep = {} if kept is None else {"keep": kept}  # kernels that keep nothing need not know of it
    if call.sequence_parallel:
        records, logits = _gathered_forward(call, x, keep)
    elif not keep and _folds_at_once(call, x, "forward_rows"):
        rule = (call.ignore_index, call.real_vocab_size, call.invalid)
        cut = {} if x.cut is None else {"cut": x.cut}
        return *call.kernel.forward_rows(*x[:5], call.problem, *rule, want_logits=call.want_logits, **cut), None
    else:
        records, logits = call.local_forward(x, want_logits=call.want_logits, **keep)
    return call.fold_records(records, x.target_ids), logits, kept


def _folds_at_once(call: Call, x: LinearOperands, function: str) -> bool:
    """Whether the kernels have one for forward and fold of a process alone."""
    if call.group is not None or not hasattr(call.kernel, function):
        return False
    return x.cut is None or truncated.takes_cut(call.kernel, function)


def linear_scores(
    call: Call, x: LinearOperands, want_lse: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """logp, lse, entropy and logits with no backward to come; what is not wanted may be None."""
    if _folds_at_once(call, x, "forward_scores"):
        rule = (call.ignore_index, call.real_vocab_size, call.invalid)
        wanted: dict[str, Any] = {"want_lse": want_lse, "want_logits": call.want_logits}
        cut = {} if x.cut is None else {"cut": x.cut}
        return call.kernel.forward_scores(*x[:5], call.problem, *rule, **wanted, **cut)
    folded, logits, _ = linear_forward(call, x)
    return folded.logp, folded.lse, folded.entropy, logits


def _gathered_forward(call: Call, x: LinearOperands, keep: dict[str, KeptLogits]) -> tuple[Tensor, Tensor | None]:
    """From this rank's rows [n, D] the records of all N; some rows are worked on as others travel.

    Rows come by piece and then by rank; a row's record is the same in any batch, and is put in its place.
    """
    size, own = rank_and_size(call.group)[1], x.hidden.shape[0]
    records = new_records(size * own, call.problem.entropy, x.hidden.device)
    placed, logits = records.view(-1, size, own), None
    gathered = gather_rows(x.hidden, call.group)
    if keep or call.want_logits:
        # what has all rows in order comes from one call; a rank may keep logits alone, so rows travel as ever
        gathered = iter([(slice(0, own), in_rank_order(gathered, size))])
    for rows, piece in gathered:

        def of_piece(per_row: Any, rows: slice = rows) -> Any:
            return per_row.view(size, own)[:, rows].reshape(-1) if isinstance(per_row, Tensor) else per_row

        of_rows = LinearOperands(
            piece, x.weight, x.bias, of_piece(x.target_ids), of_piece(x.inv_temperature), of_piece(x.cut)
        )
        part, logits = call.local_forward(of_rows, want_logits=call.want_logits, **keep)
        placed[:, :, rows] = part.view(-1, size, rows.stop - rows.start)
    return records, logits


def linear_backward(
    call: Call,
    x: LinearOperands,
    saved: SavedRows,
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None],
    kept: KeptLogits | None,
    needs: Needs,
    last_use: bool = False,
) -> Gradients:
    """From upstream gradients [N] of logp, lse and entropy to what autograd gets of hidden, weight and bias.

    last_use: no other backward will read `kept`.
    """
    dtype = x.hidden.dtype
    if call.sequence_parallel:
        ((_, hidden),) = gather_rows(x.hidden, call.group, pieces=False)
        x = x._replace(hidden=hidden)
    run = _LocalBackward(call, x, saved, Upstream(*upstream), kept, last_use)
    ordered = call.grad.reduce == "ordered" and needs.hidden
    grad_hidden, grad_weight, grad_bias = run.ordered(needs) if ordered else run.summed(needs)
    if needs.weight and call.grad.main_grad is not None:
        torch.autograd.graph.increment_version(call.grad.main_grad)
        if hasattr(call.weight, "grad_added_to_main_grad"):
            call.weight.grad_added_to_main_grad = True
            grad_weight = torch.zeros_like(x.weight)
    # in fp32 until here, and rounded once
    return None if grad_hidden is None else grad_hidden.to(dtype), grad_weight, grad_bias


@dataclass
class _LocalBackward:
    """The operands of a backward, all N rows; grad_hidden comes back as this rank shall have it, not yet rounded."""

    call: Call
    x: LinearOperands
    saved: SavedRows
    upstream: Upstream
    kept: KeptLogits | None
    last_use: bool
    _grads: RowGrads | None = None

    @property
    def grads(self) -> RowGrads:
        """Upstream gradients as coefficients, made once."""
        if self._grads is None:
            self._grads = self.call.row_grads(self.x.target_ids, *self.upstream)
        return self._grads

    def whole(self, needs: Needs, how: GradPlan) -> Gradients:
        """The kernel's backward of every row, from upstream gradients as they come where it takes them so."""
        call = self.call
        if self.kept is None and self.x.cut is None and hasattr(call.kernel, "backward_upstream"):
            gradients = call.kernel.backward_upstream(
                *self.x[:5], call.problem, self.saved, self.upstream, needs, how, call.ignore_index,
                call.real_vocab_size,
            )  # fmt: skip
            if gradients is not None:
                return gradients
        return self.on(self.every_row, needs, how)

    def on(self, rows: slice, needs: Needs, how: GradPlan) -> Gradients:
        """The kernel's backward of those rows alone."""

        def part(x: Any) -> Any:
            return x[rows] if isinstance(x, Tensor) else x

        if self.kept is not None:
            how = replace(how, kept=self.kept.part(rows.start, rows.stop))
        backward, cut = self.call.kernel.backward, {}
        if self.x.cut is not None:
            backward, cut = truncated.backward, {"kernel": self.call.kernel, "cut": self.x.cut[rows]}
        return backward(
            self.x.hidden[rows],
            self.x.weight,
            self.x.bias,
            self.x.target_ids[rows],
            part(self.x.inv_temperature),
            self.call.problem,
            SavedRows(*map(part, self.saved)),
            RowGrads(*map(part, self.grads)),
            needs,
            how,
            **cut,
        )

    @property
    def every_row(self) -> slice:
        return slice(0, self.x.hidden.shape[0])

    def summed(self, needs: Needs) -> Gradients:
        """Every rank's columns at a time; the last products for grad_weight hide the sum of grad_hidden."""
        call = self.call
        if call.group is None:  # nothing is added to grad_hidden
            how = _ALONE
            if call.grad.main_grad is not None or self.kept is not None:
                how = replace(_ALONE, main_grad=call.grad.main_grad, last_use=self.last_use)
            return self.whole(needs, how)
        total = HiddenSum(call.group, call.grad.wire_dtype, call.sequence_parallel)
        if not needs.hidden:
            return self.whole(needs, GradPlan(call.grad.main_grad, last_use=self.last_use))
        parts = total.parts(*self.x.hidden.shape)
        how = GradPlan(
            call.grad.main_grad,
            hidden_ready=total.start,
            ready_rows=parts,
            last_use=self.last_use,
            rounded_hidden=rank_and_size(call.group)[1] == 1,
        )
        grad_hidden, grad_weight, grad_bias = self.whole(needs, how)
        assert grad_hidden is not None
        return total.result(grad_hidden), grad_weight, grad_bias

    def ordered(self, needs: Needs) -> Gradients:
        """Rank after rank in each chunk of rows; the pass for grad_weight hides the last rank's answer."""
        call, grad_weight, grad_bias = self.call, None, None
        accumulators = torch.zeros(self.x.hidden.shape, dtype=torch.float32, device=self.x.hidden.device)

        def add(rows: slice) -> None:
            self.on(rows, Needs(True, False, False), GradPlan(grad_hidden=accumulators[rows]))

        everywhere = continue_over_group(accumulators, add, call.group)
        if needs.weight or needs.bias:
            alone = Needs(False, needs.weight, needs.bias)
            _, grad_weight, grad_bias = self.whole(alone, GradPlan(call.grad.main_grad))
        grad_hidden = everywhere.wait()
        if call.sequence_parallel:
            rank, size = rank_and_size(call.group)
            own = grad_hidden.shape[0] // size
            grad_hidden = grad_hidden[rank * own : (rank + 1) * own]
        return grad_hidden, grad_weight, grad_bias
