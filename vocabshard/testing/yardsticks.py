"""What times are held against: one set of inputs, the library's matrix products alone, and torch's own log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FOUR = "z z dH dW"  # the products of a forward + backward that keeps nothing of size N * V


@dataclass(frozen=True)
class HeadInputs:
    """hidden [N, D], weight [V, D] of one dtype, logits of which are about N(0, 1); target [N]; upstream fp32 [N].

    One upstream gradient a row, which bf16 holds exactly.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor
    upstream: Tensor

    @classmethod
    def make(cls, n: int, d: int, v: int, dtype: torch.dtype, device: torch.device | str) -> HeadInputs:
        """The same values for the same sizes on the same kind of device."""
        g = torch.Generator(device).manual_seed(0)
        hidden = torch.randn(n, d, device=device, generator=g).to(dtype)
        weight = torch.empty(v, d, device=device, dtype=dtype)
        for rows in weight.split(16384):
            rows.copy_(torch.randn(rows.shape, device=device, generator=g) * d**-0.5)
        target = torch.randint(0, v, (n,), device=device, generator=g)
        upstream = torch.randn(n, device=device, generator=g).bfloat16().float()
        return cls(hidden, weight, target, upstream)


def products(x: HeadInputs) -> Callable[[str], Callable[[], None]]:
    """The library's matrix products alone, named in order: z = hidden @ weight.T (2 N D V operations, written out), and
    dH and dW of a gradient of z's shape and dtype."""
    z = torch.empty(len(x.hidden), len(x.weight), dtype=x.hidden.dtype, device=x.hidden.device)
    grad_hidden, grad_weight = torch.empty_like(x.hidden), torch.empty_like(x.weight)

    each: dict[str, Callable[[], Any]] = {
        "z": lambda: torch.mm(x.hidden, x.weight.t(), out=z),
        "dH": lambda: torch.mm(z, x.weight, out=grad_hidden),
        "dW": lambda: torch.mm(z.t(), x.hidden, out=grad_weight),
    }
    each["z"]()

    def run(names: str) -> Callable[[], None]:
        calls = [each[name] for name in names.split()]

        def call() -> None:
            for product in calls:
                product()

        return call

    return run


def torch_logp(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """fp32 [N]: torch's product, and its log_softmax in fp32."""
    return torch_logits_logp(F.linear(hidden, weight), target)


def torch_logits_logp(logits: Tensor, target: Tensor) -> Tensor:
    """fp32 [N] of logits [N, V], the softmax in fp32."""
    return torch.log_softmax(logits.float(), -1).gather(1, target[:, None])[:, 0]
