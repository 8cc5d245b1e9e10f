"""verl's fused head: its `linear_cross_entropy`, log-probs and entropy from hidden states, with the contract's bytes.

    from vocabshard.integrations import verl
    verl.install()  # before verl builds its model, with use_fused_kernels and the triton backend

docs/integrations/verl.md has the table of arguments.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vocabshard import together
from vocabshard.dist.gather import rank_and_size
from vocabshard.functional import linear_logp
from vocabshard.integrations import losses
from vocabshard.options import LogpOutput

HOME = "verl.utils.kernel.linear_cross_entropy"
NAME = "linear_cross_entropy"


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
    *,
    grad_hidden: str = "parts",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `labels` and entropies under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [..., D], the same on every rank of the group.
        weight: [V_local, D], this rank's rows, in group-rank order.
        labels: [...] global ids, int32 or int64. -100 is ignored: log-prob 0 without a gradient.
        temperature: a number, or a tensor with one element or one a row.
        reduction: "none", or "sum" or "mean" of the log-probs over all rows. The entropy is never reduced.
        dist_process_group: the tensor-parallel ProcessGroup; None is this process alone.
        grad_hidden: "parts": what the ranks get adds up to the gradient of hidden, as in verl, whose caller sums it
            (in the backward of Megatron's gather of a sequence-parallel hidden state). "whole": every rank gets all
            of it, as in `linear_logp`; for callers that do not sum.
        options: real_vocab_size, softcap, grad_options, backend, strict, ... of `linear_logp`.

    Returns: log-probs fp32 [N], flat, or a scalar; entropy fp32 [N] in nats. Both differentiable.
    Collectives: those of `linear_logp`, and where the call validates one agreement more, so that what one rank refuses
    raises on all. Raises: as it, on the CPU for labels outside the vocabulary too.
    """

    def check() -> None:
        losses.check(reduction, 0.0)
        if grad_hidden not in ("parts", "whole"):
            raise ValueError(f'grad_hidden must be "parts" or "whole", got {grad_hidden!r}')
        for name in ("return_lse", "return_entropy", "return_logits", "topk", "tp_group"):
            if name in options:
                raise NotImplementedError(f"{name} is not an option of verl's linear_cross_entropy; call linear_logp")
        together.known("linear_cross_entropy", linear_logp, options)

    together.checked(
        check, dist_process_group, (hidden, weight, labels), validate=options.get("validate"),
        backend=options.get("backend", "auto"), stated=lambda: (reduction, grad_hidden),
    )  # fmt: skip
    size = rank_and_size(dist_process_group)[1]
    if grad_hidden == "parts" and size > 1 and isinstance(hidden, Tensor):
        hidden = _ShareOfGradient.apply(hidden, size)
    if isinstance(temperature, Tensor) and isinstance(labels, Tensor) and temperature.numel() == labels.numel():
        temperature = temperature.reshape(labels.shape)
    out = linear_logp(
        hidden, weight, labels, temperature=temperature, tp_group=dist_process_group, return_entropy=True, **options
    )
    assert isinstance(out, LogpOutput) and out.entropy is not None
    logp = out.logp.flatten()
    if reduction != "none":
        logp = logp.sum() if reduction == "sum" else logp.mean()
    return logp, out.entropy.flatten()


class _ShareOfGradient(torch.autograd.Function):
    """The tensor as it is; of a gradient that every rank has whole, this rank's share."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, size: int) -> Tensor:
        """A view."""
        ctx.size = size
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        """1 / W of it: exact where W is a power of two."""
        return upstream[0] / ctx.size, None


_theirs: dict[str, Any] = {}  # what was replaced, by the module that had it


def install() -> None:
    """Puts `linear_cross_entropy` in the place of verl's, in its own module and wherever verl has imported it.

    Call it in every worker process, before or after verl imports its models; `uninstall()` undoes it. Collectives:
    none. Raises: ImportError without verl; RuntimeError where verl has no such function.
    """
    home = importlib.import_module(HOME)
    original = getattr(home, NAME, None)
    if original is linear_cross_entropy:
        original = _theirs[HOME]
    if original is None:
        raise RuntimeError(f"{HOME} has no {NAME}; this verl's fused head is not known")
    for name, module in _modules_with(original):
        _theirs[name] = original
        setattr(module, NAME, linear_cross_entropy)


def uninstall() -> None:
    """Gives verl its own function back, in every module that has ours."""
    original = _theirs.get(HOME)
    if original is None:
        return
    for _, module in _modules_with(linear_cross_entropy):
        setattr(module, NAME, original)
    _theirs.clear()


def _modules_with(function: Any) -> list[tuple[str, ModuleType]]:
    of_verl = [(name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "verl"]
    return [(name, module) for name, module in of_verl if vars(module).get(NAME) is function]
