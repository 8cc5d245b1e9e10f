"""RL-Kernel's operators `linear_logp` and `batch_invariant_logp` as its registry gives them, with the contract's bytes.

    from vocabshard.integrations.rl_kernel import kernel_registry  # instead of rl_engine.kernels.registry

It imports nothing of RL-Kernel. docs/integrations/rl_kernel.md has the table of the arguments.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vocabshard.functional import batch_invariant_logp as _of_logits
from vocabshard.functional import linear_logp as _of_hidden
from vocabshard.options import LogpOutput

NOTHING_IGNORED = -(2**63)  # linear_logp there has no ignore_index: every target outside of the vocabulary is bad


def linear_logp(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None = None,
    *,
    tp_group: Any = None,
    vocab_start_index: int = 0,
    global_vocab_size: int | None = None,
) -> Tensor:
    """Log-prob of each target, fp32 [...], from hidden [..., D] and this rank's weight [V_local, D] (bias [V_local]).

    Every target counts: one outside of the vocabulary (-100 too) is a ValueError on the CPU, and NaN on a GPU. Padding
    counts as vocabulary, as it does there; to leave it out call `vocabshard.linear_logp` with real_vocab_size.

    Collectives, gradients, determinism: those of `vocabshard.linear_logp`. hidden's gradient is the whole one on
    every rank, weight's and bias's are this rank's.
    """
    logp = _of_hidden(
        hidden, lm_head_weight, target_ids, bias, tp_group=tp_group, vocab_start_index=vocab_start_index,
        global_vocab_size=global_vocab_size, ignore_index=NOTHING_IGNORED,
    )  # fmt: skip
    assert isinstance(logp, Tensor)
    return logp


def batch_invariant_logp(
    logits: Tensor, target_ids: Tensor, ignore_index: int = -100, *, validate: bool = True
) -> Tensor:
    """Log-prob of each target, fp32 [...], from logits [..., V] that exist; ignored rows are 0 and send no gradient.

    validate=True reads targets back and raises ValueError for those outside of [0, V); without it they give NaN.
    """
    logp = _of_logits(logits, target_ids, ignore_index, validate)
    assert isinstance(logp, Tensor)
    return logp


class LinearLogpOp:
    """What `kernel_registry.get_op("linear_logp")` gives: `op(...)` and `op.apply(...)` are `linear_logp`."""

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        """As `linear_logp`."""
        return linear_logp(*args, **options)

    apply = __call__


class BatchInvariantLogpOp:
    """What `kernel_registry.get_op("batch_invariant_logp")` gives: `op(...)` is `batch_invariant_logp`."""

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        """As `batch_invariant_logp`."""
        return batch_invariant_logp(*args, **options)

    apply = __call__

    def forward_with_lse(
        self, logits: Tensor, target_ids: Tensor, ignore_index: int = -100, *, validate: bool = True
    ) -> tuple[Tensor, Tensor]:
        """(logp, lse), both fp32 [...] and differentiable; lse is that of ignored rows too."""
        out = _of_logits(logits, target_ids, ignore_index, validate, return_lse=True)
        assert isinstance(out, LogpOutput) and out.lse is not None
        return out.logp, out.lse


class KernelRegistry:
    """The two operators by name, as RL-Kernel's `kernel_registry` gives all of its own."""

    def get_op(self, op_type: str) -> LinearLogpOp | BatchInvariantLogpOp:
        """An operator; NotImplementedError for those that only RL-Kernel has."""
        if op_type == "linear_logp":
            return LinearLogpOp()
        if op_type == "batch_invariant_logp":
            return BatchInvariantLogpOp()
        raise NotImplementedError(
            f"get_op: vocabshard has linear_logp and batch_invariant_logp of RL-Kernel's operators, not {op_type!r}; "
            "take that one from rl_engine.kernels.registry"
        )


kernel_registry = KernelRegistry()
