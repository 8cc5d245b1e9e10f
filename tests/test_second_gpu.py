"""Every operator, forward and backward, on tensors of cuda:1 while cuda:0 is current: the bytes of cuda:0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.testing.compare import assert_same_bytes

pytestmark = pytest.mark.needs("multigpu")

N, D, V = 70, 64, 1000


def inputs(device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g) * 0.4
    bias, target, upstream = (
        torch.randn(V, generator=g),
        torch.randint(0, V, (N,), generator=g),
        torch.randn(3, N, generator=g),
    )
    return tuple(x.to(device) for x in (hidden.to(dtype), weight.to(dtype), bias, target, upstream))


def same_on_both(run) -> None:
    """`run(device)` -> tensors, on each device with cuda:0 current throughout."""
    with torch.cuda.device(0):
        first, second = run("cuda:0"), run("cuda:1")
        assert torch.cuda.current_device() == 0
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert b is None or b.device.index == 1
        assert_same_bytes(None if b is None else b.cpu(), None if a is None else a.cpu(), f"result {i}")


OPTIONS = {
    "plain": {},
    "saved": {"save_logits_budget": "auto"},
    "main_grad": {"main_grad": True},
    "ordered": {"reduce": "ordered"},
}


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["auto", "sm90", "triton", "torch"])
def test_linear_logp(backend: str, dtype: torch.dtype, name: str) -> None:
    def run(device: str) -> list[Tensor | None]:
        hidden, weight, bias, target, upstream = inputs(device, dtype)
        leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
        options = dict(OPTIONS[name])
        if name == "main_grad":
            options["main_grad"] = torch.zeros(V, D, device=device)
        out = vs.linear_logp(hidden, weight, target, bias, return_lse=True, return_entropy=True, temperature=0.7,
                             backend=backend, grad_options=vs.GradOptions(**options))  # fmt: skip
        torch.autograd.backward(list(out[:3]), list(upstream))
        return [*(x.detach() for x in out[:3]), *(leaf.grad for leaf in leaves), options.get("main_grad")]

    try:
        same_on_both(run)
    except (NotImplementedError, ValueError) as error:
        if "ordered" not in str(error) and "does not serve" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("inplace", [False, True])
def test_operators_over_logits(inplace: bool) -> None:
    def run(device: str) -> list[Tensor | None]:
        hidden, weight, _, target, upstream = inputs(device, torch.float32)
        results: list[Tensor | None] = []
        for operator in (vs.vocab_parallel_logp, vs.batch_invariant_logp):
            logits = (hidden.cpu() @ weight.cpu().t()).to(device).requires_grad_()
            out = operator(logits * 1, target, return_lse=True, return_entropy=True, inplace_backward=inplace)
            torch.autograd.backward(list(out[:3]), list(upstream))
            results += [*(x.detach() for x in out[:3]), logits.grad]
        return results

    same_on_both(run)
