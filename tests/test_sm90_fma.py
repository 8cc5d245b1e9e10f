"""fp32 on Hopper: gradients by FMA chains of our own, held against the forward's chain and against fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.kernels.problem import GradPlan, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.testing.compare import assert_same_bytes

pytestmark = pytest.mark.needs("sm90")


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator("cuda").manual_seed(seed))


@pytest.mark.parametrize("m, k, c", [(1, 1, 1), (3, 17, 5), (64, 100, 132), (130, 255, 1000), (2100, 64, 2100)])
def test_the_product_is_the_forwards_chain(m: int, k: int, c: int) -> None:
    from vocabshard.kernels.sm90_fma import add_product

    a, b = randn(m, k), randn(k, c, seed=1)
    target = torch.zeros(m, dtype=torch.int64)
    want = vs.linear_logp(a, b.t(), target, return_logits=True, backend="sm90").logits
    for left in (a, a.t().contiguous().t(), torch.cat([a, a], 1)[:, :k], a.repeat_interleave(2, 1)[:, ::2]):
        got = torch.zeros(m, c)
        add_product(got, left, b)
        assert_same_bytes(got, want, f"strides {left.stride()}")
    for cut in {1, k // 2, k - 1} - {0}:
        got = torch.zeros(m, c + 3)[:, :c]
        add_product(got, a[:, :cut], b[:cut])
        add_product(got, a[:, cut:], b[cut:])
        assert_same_bytes(got.contiguous(), want, f"in two from {cut} on")


def gradients(hidden: Tensor, weight: Tensor, target: Tensor, gs: Tensor, **options) -> tuple[Tensor, Tensor]:
    h, w = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    out = vs.linear_logp(h, w, target, return_lse=True, return_entropy=True, backend="sm90", **options)
    torch.autograd.backward([out.logp, out.lse, out.entropy], list(gs))
    return h.grad, w.grad


def test_rows_do_not_depend_on_their_batch_or_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from vocabshard.kernels import blockwise

    hidden, weight, target, gs = randn(300, 70), randn(3001, 70, seed=1) * 0.3, torch.arange(300) * 9, randn(3, 300)
    want = gradients(hidden, weight, target, gs)
    for n in (1, 2, 7, 64, 129):
        for first in (0, 150 - n, 300 - n):
            rows = slice(first, first + n)
            got = gradients(hidden[rows], weight, target[rows], gs[:, rows])[0]
            assert_same_bytes(got, want[0][rows], f"{n} rows from {first}")
    monkeypatch.setattr(blockwise, "SCRATCH_ELEMENTS", 1 << 17)
    for a, b in zip(gradients(hidden, weight, target, gs), want, strict=True):
        assert_same_bytes(a, b)
    ordered = vs.GradOptions(reduce="ordered")
    for a, b in zip(gradients(hidden, weight, target, gs, grad_options=ordered), want, strict=True):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_go_on_where_the_one_before_stopped(dtype: torch.dtype) -> None:
    from vocabshard.kernels import sm90

    n, d, v = 200, 64, 3000
    hidden, weight, target = randn(n, d).to(dtype), (randn(v, d, seed=1) * 0.3).to(dtype), torch.arange(n) * 15
    out = vs.linear_logp(hidden, weight, target, return_lse=True, backend="sm90")
    lse2 = out.lse.double() * 1.4426950408889634
    saved = SavedRows(lse2.round().int(), (lse2 - lse2.round()).float(), None)
    grads = RowGrads(randn(n), randn(n, seed=3), None)
    whole = torch.zeros(n, d)
    parts = torch.zeros(n, d)
    for sums, bounds in ((whole, (0, v)), (parts, (0, 16, 1008, 2000, v))):
        for start, stop in itertools.pairwise(bounds):
            share = LocalProblem(start, stop - start, None, False)
            arguments = (hidden, weight[start:stop], None, target, None, share, saved, grads)
            sm90.backward(*arguments, Needs(True, False, False), GradPlan(grad_hidden=sums))
    assert_same_bytes(parts, whole)


@pytest.mark.parametrize("n, d, v", [(1, 8, 50), (257, 65, 777), (300, 768, 9000)])
def test_against_fp64(n: int, d: int, v: int) -> None:
    hidden, weight, target, gs = randn(n, d), randn(v, d, seed=1) * 0.3, torch.arange(n) % v, randn(3, n)
    z = vs.linear_logp(hidden, weight, target, return_logits=True, backend="sm90").logits.double().requires_grad_()
    logps = torch.log_softmax(z, -1)
    outputs = [logps.gather(1, target[:, None])[:, 0], torch.logsumexp(z, -1), -(logps.exp() * logps).sum(-1)]
    torch.autograd.backward(outputs, list(gs.double()))
    exact = (z.grad @ weight.double(), z.grad.T @ hidden.double())
    for got, want in zip(gradients(hidden, weight, target, gs), exact, strict=True):
        assert (got.double() - want).norm() < 3e-6 * want.norm()
