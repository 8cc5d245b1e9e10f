"""The gradient of the logits that a Hopper forward made, by torch's autograd: what its backward is held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.sampling import left_out


def dlogits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    gs: Sequence[Tensor | None],
    dtype: torch.dtype,
    *,
    temperature: float | Tensor | None = None,
    softcap: float | None = None,
    cut: Tensor | None = None,
    backend: str = "sm90",
) -> Tensor:
    """dL/dz [N, V] in `dtype`; hidden [N, D], weight [V, D], upstream gradients of logp, lse and entropy [N] each.
    cut int64 [N]: what a truncation keeps, of logits with bias and soft-cap."""

    def logits(cap: float | None) -> Tensor:
        made = vs.linear_logp(hidden, weight, target, bias, softcap=cap, return_logits=True, backend=backend)
        assert isinstance(made, vs.LogpOutput) and made.logits is not None
        return made.logits.detach()

    capped = logits(softcap)
    z = leaf = capped.to(dtype, copy=True).requires_grad_()
    if cut is not None:
        z = z.masked_fill(left_out(capped, 0, cut), float("-inf"))
    if temperature is not None:
        reciprocal = (1 / torch.as_tensor(temperature).double()).float().to(dtype)
        z = z * (reciprocal[:, None] if reciprocal.dim() else reciprocal)
    logps = torch.log_softmax(z, -1)
    entropy = -(logps.exp() * torch.where(torch.isneginf(logps), 0.0, logps)).sum(-1)
    outputs = (logps.gather(1, target[:, None])[:, 0], torch.logsumexp(z, -1), entropy)
    pairs = [(o, g.to(dtype)) for o, g in zip(outputs, gs, strict=True) if g is not None]
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    dz = leaf.grad
    assert dz is not None
    if softcap is not None:
        dz = dz * (1 - torch.tanh(logits(None).to(dtype) / softcap) ** 2)
    return dz
