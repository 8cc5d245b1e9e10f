"""What a local kernel is given besides its tensors, and what it gives back. N rows, D hidden size, V_local columns.

A kernel module has
    forward(hidden, weight, bias, target_ids, inv_temperature, problem, *, want_logits=False[, keep=KeptLogits])
        -> records, logits | None
    forward_rows(..., problem, ignore_index, real_vocab_size, invalid, *, want_logits) -> FoldedRows, logits | None
    forward_scores(the same, want_lse) -> logp, lse | None, entropy | None, logits | None
                                                            both optional: forward and fold at once, for one process
    backward(hidden, weight, bias, target_ids, inv_temperature, problem, saved, grads, needs, how)
        -> grad_hidden fp32 [N, D] (see GradPlan.rounded_hidden) | None, grad_weight | None, grad_bias | None
    row_grads(upstream, target_ids, ignore_index, real_vocab_size) -> RowGrads      where it has a kernel for that
    backward_upstream(..., saved, upstream, needs, how, ignore_index, real_vocab_size) -> what backward gives, or None
                                                            (optional) the same from upstream gradients as they come,
                                                            of all rows; None: it would rather have RowGrads
    kept_bytes_per_row(columns, dtype) -> int         what KeptLogits take; 0: this kernel keeps nothing
    new_kept(rows, columns, dtype, device) -> KeptLogits    to be filled by forward(keep=...), of problem.valid columns
    why_not_kept(hidden, weight, problem) -> str      (optional) why it keeps nothing of such operands, "" where it does
    KEPT_ROWS                                         (optional) what rows are kept in multiples of, if not all are
    draw_rows, draw_records, fold_draws    (all three or none) a token of each of DRAWN_ROWS rows beside the forward, of
                                           all columns: kernels/sm90_draw.py
    sample_rows                            (optional) tokens of whole rows under a program: the same
    CONTINUES_CHAIN                                         dtypes whose grad_hidden is one ascending chain over the
                                                            columns, so that no boundary between shards shows in it
What is kept never changes a byte of the records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
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


class DrawnRows(NamedTuple):
    """Tokens drawn of all columns, and their log-probs, [N] each."""

    tokens: Tensor  # int64, -1 in a row without a distribution
    cut: Tensor  # int64: everything is kept
    logp: Tensor  # fp32
    lse: Tensor | None  # fp32


class Upstream(NamedTuple):
    """Upstream gradients of logp, lse and entropy, fp32 [N] of any stride each, or None where nothing flows."""

    logp: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


class Needs(NamedTuple):
    """Which gradients are wanted; what is not wanted costs nothing."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass(frozen=True)
class KeptLogits:
    """What a forward left of its first rows, so that the backward need not make their logits again.

    Opaque to all but the kernel module that made it, except for this: every tensor has a row in each of its rows. The
    backward may run again, so it may not change them without GradPlan.last_use.
    """

    tensors: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        """How many leading rows were kept."""
        return self.tensors[0].shape[0]

    def part(self, start: int, stop: int) -> KeptLogits | None:
        """Of rows start ... stop as a batch of its own."""
        stop = min(stop, self.rows)
        return KeptLogits(tuple(t[start:stop] for t in self.tensors)) if start < stop else None


@dataclass(frozen=True)
class GradPlan:
    """How a backward is to leave its gradients; the defaults are those of an ordinary call."""

    # fp32 [V_local, D] that grad_weight is added to in place, each element once; None is then returned for it
    main_grad: Tensor | None = None
    # fp32 [N, D], contiguous: accumulators that this shard's columns continue in place, ascending (else from zero)
    grad_hidden: Tensor | None = None
    # called exactly once, when grad_hidden is complete on the current stream and before the last block's products for
    # grad_weight are enqueued, so that they hide what it starts; never called where hidden needs no gradient
    hidden_ready: Callable[[Tensor], None] | None = None
    # rows, ascending, that hidden_ready would rather have one part after the other, as soon as each is complete: it is
    # called once with each then. A kernel that makes them all at a time calls it so at the end.
    ready_rows: tuple[slice, ...] = ()
    kept: KeptLogits | None = None
    # nobody reads `kept` after this call: it may be overwritten
    last_use: bool = False
    # grad_hidden may come back in hidden's dtype, rounded once: nothing will be added to it
    rounded_hidden: bool = False

    def announce(self, grad_hidden: Tensor) -> None:
        """Tells hidden_ready, if there is one, that all of it is complete."""
        if self.hidden_ready is None:
            return
        for part in [grad_hidden[rows] for rows in self.ready_rows] or [grad_hidden]:
            self.hidden_ready(part)


ORDINARY = GradPlan()


def keeps_nothing(columns: int, dtype: torch.dtype) -> int:
    """`kept_bytes_per_row` of a kernel that always makes its logits again."""
    return 0
