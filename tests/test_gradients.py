"""Gradients of logp, lse and entropy: against fp64, never worse than torch's own fp32; exact zeros; equal bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.testing.compare import assert_same_bytes

Grads = tuple[Tensor, Tensor, Tensor]


def problem(n: int, d: int, v: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, d, generator=g),
        torch.randn(v, d, generator=g) * (scale / d**0.5),
        torch.randn(v, generator=g),
        torch.randint(0, v, (n,), generator=g),
    )


def upstream(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Different in every row, some exactly 0, some negative."""
    g = torch.Generator().manual_seed(seed + 99)
    gs = torch.randn(3, n, generator=g)
    gs[:, ::5] = 0
    return gs[0], gs[1], gs[2]


def ours(hidden, weight, bias, target, gs, **options) -> Grads:
    h, w, b = (x.detach().clone().requires_grad_() for x in (hidden, weight, bias))
    out = vs.linear_logp(h, w, target, b, return_lse=True, return_entropy=True, **options)
    torch.autograd.backward([out.logp, out.lse, out.entropy], list(gs))
    return h.grad, w.grad, b.grad


def plain(hidden, weight, bias, target, gs, dtype, *, temperature=None, softcap=None, ignore_index=-100) -> Grads:
    """The textbook composition in `dtype`, from the contract's fp32 logits: the projection's own rounding is its bytes,
    and every gradient is of the function that was computed."""
    options = {"ignore_index": ignore_index, "return_logits": True}
    logits = vs.linear_logp(hidden, weight, target, bias, softcap=softcap, **options).logits
    leaf = logits.detach().clone().to(dtype).requires_grad_()
    z = leaf
    if temperature is not None:
        reciprocal = (1 / torch.as_tensor(temperature).double()).float().to(dtype)
        z = z * (reciprocal[:, None] if reciprocal.dim() else reciprocal)
    logps = torch.log_softmax(z, -1)
    ignored = target == ignore_index
    logp = torch.where(ignored, 0.0, logps.gather(1, torch.where(ignored, 0, target)[:, None])[:, 0])
    entropy = -(logps.exp() * torch.where(torch.isneginf(logps), 0.0, logps)).sum(-1)
    torch.autograd.backward([logp, torch.logsumexp(z, -1), entropy], [g.to(dtype) for g in gs])
    dz = leaf.grad
    if softcap is not None:
        before = vs.linear_logp(hidden, weight, target, bias, **options).logits.detach().to(dtype)
        dz = dz * (1 - torch.tanh(before / softcap) ** 2)
    return dz @ weight.to(dtype), dz.T @ hidden.to(dtype), dz.sum(0)


def no_worse(got: Grads, theirs: Grads, want: Grads) -> None:
    for g, t, w, name in zip(got, theirs, want, ("hidden", "weight", "bias"), strict=True):
        error, bar = (g.double() - w).norm(), (t.double() - w).norm()
        assert error <= bar, f"grad_{name}: {error:.3e}, torch fp32 {bar:.3e}"


@pytest.mark.parametrize("n, d, v", [(1, 8, 50), (33, 100, 1000), (257, 16, 777), (64, 64, 4097)])
def test_against_fp64(n: int, d: int, v: int) -> None:
    hidden, weight, bias, target = problem(n, d, v)
    gs = upstream(n)
    args = (hidden, weight, bias, target, gs)
    no_worse(ours(*args), plain(*args, torch.float32), plain(*args, torch.float64))


@pytest.mark.parametrize("d", [16, 256])
def test_against_fp64_throughout(d: int) -> None:
    """The projection's rounding included: an ascending chain has the error of one, a library's blocks somewhat less."""
    hidden, weight, bias, target = problem(64, d, 2000)
    h, w, b = (x.double().requires_grad_() for x in (hidden, weight, bias))
    logp = torch.log_softmax(h @ w.T + b, -1).gather(1, target[:, None])[:, 0]
    g = upstream(64)[0]
    logp.backward(g.double())
    got = ours(hidden, weight, bias, target, (g, torch.zeros(64), torch.zeros(64)))
    for ours_, want in zip(got, (h.grad, w.grad, b.grad), strict=True):
        assert (ours_.double() - want).norm() < 1.5e-6 * want.norm()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_output_alone(which: int) -> None:
    hidden, weight, bias, target = problem(33, 24, 500)
    gs = tuple(g if i == which else torch.zeros(33) for i, g in enumerate(upstream(33)))
    args = (hidden, weight, bias, target, gs)
    no_worse(ours(*args), plain(*args, torch.float32), plain(*args, torch.float64))
    h = hidden.clone().requires_grad_()
    out = vs.linear_logp(h, weight, target, bias, return_lse=True, return_entropy=True)
    out[which].backward(gs[which])
    assert_same_bytes(h.grad, ours(*args)[0], "an output that is not used is an output with gradient 0")


@pytest.mark.parametrize("temperature", [0.7, "rows"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_temperature_and_softcap(temperature, softcap) -> None:
    hidden, weight, bias, target = problem(33, 24, 500)
    t = torch.rand(33) + 0.5 if temperature == "rows" else temperature
    args = (hidden, weight, bias, target, upstream(33))
    options = {"temperature": t, "softcap": softcap}
    no_worse(ours(*args, **options), plain(*args, torch.float32, **options), plain(*args, torch.float64, **options))


@pytest.mark.parametrize("offset", [1e4, 1e5])
def test_offsets(offset: float) -> None:
    hidden, weight, bias, target = problem(33, 24, 500)
    args = (hidden, weight, bias + offset, target, upstream(33))
    want = plain(*args, torch.float64)
    no_worse(ours(*args), plain(*args, torch.float32), want)


def test_near_certain_targets_keep_their_gradient() -> None:
    weight = torch.tensor([[0.0], [-14.0], [-15.0], [-16.5]])
    for dtype in (torch.float32, torch.bfloat16):
        h = torch.ones(1, 1, dtype=dtype).requires_grad_()
        w = weight.to(dtype, copy=True).requires_grad_()
        vs.linear_logp(h, w, torch.tensor([0])).sum().backward()
        hd, wd = torch.ones(1, 1).double().requires_grad_(), weight.double().requires_grad_()
        torch.log_softmax(hd @ wd.T, -1)[0, 0].backward()
        assert w.grad[0, 0] != 0
        torch.testing.assert_close(w.grad.double(), wd.grad, rtol=0.1, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    hidden, weight, bias, target = problem(65, 64, 700)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    gs = upstream(65)
    got = ours(hidden, weight, bias, target, gs)
    want = plain(hidden, weight, bias, target, gs, torch.float64)
    assert got[0].dtype == got[1].dtype == dtype and got[2].dtype == torch.float32
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).norm() < (3e-3 if dtype == torch.bfloat16 else 4e-4) * w.norm()


def test_what_needs_no_gradient_gets_none_and_equal_bytes_run_to_run() -> None:
    hidden, weight, bias, target = problem(33, 24, 500)
    gs = upstream(33)
    whole = ours(hidden, weight, bias, target, gs)
    for a, b in zip(ours(hidden, weight, bias, target, gs), whole, strict=True):
        assert_same_bytes(a, b)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        leaves = [x.clone().requires_grad_(n) for x, n in zip((hidden, weight, bias), needs, strict=True)]
        out = vs.linear_logp(*leaves[:2], target, leaves[2], return_lse=True, return_entropy=True)
        torch.autograd.backward([out.logp, out.lse, out.entropy], list(gs))
        for leaf, need, want in zip(leaves, needs, whole, strict=True):
            assert (leaf.grad is not None) == need
            if need:
                assert_same_bytes(leaf.grad, want)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_rows_that_count_for_nothing_are_exactly_zero(backend: str) -> None:
    hidden, weight, bias, target = problem(9, 16, 100)
    keep = torch.tensor([0, 2, 5])
    broken = hidden.clone()
    dropped = torch.ones(9, dtype=torch.bool)
    dropped[keep] = False
    broken[dropped] = float("nan")
    ignored = target.clone()
    ignored[dropped] = -100
    h, w, b = (x.clone().requires_grad_() for x in (broken, weight, bias))
    logp = vs.linear_logp(h, w, ignored, b, backend=backend)
    assert (logp[dropped] == 0).all()
    logp.sum().backward()
    assert (h.grad[dropped] == 0).all()
    h2, w2, b2 = (x.clone().requires_grad_() for x in (hidden[keep], weight, bias))
    vs.linear_logp(h2, w2, target[keep], b2, backend=backend).sum().backward()
    torch.testing.assert_close(w.grad, w2.grad)
    torch.testing.assert_close(b.grad, b2.grad)
    assert_same_bytes(h.grad[keep], h2.grad) if backend == "cpu" else torch.testing.assert_close(h.grad[keep], h2.grad)
    # every row ignored
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    vs.linear_logp(h, w, torch.full((9,), -100), backend=backend).sum().backward()
    assert (h.grad == 0).all() and (w.grad == 0).all()
    # a zero upstream gradient, whatever the row holds
    h, w = broken.clone().requires_grad_(), weight.clone().requires_grad_()
    vs.linear_logp(h, w, target, backend=backend).backward((~dropped).float())
    assert torch.isfinite(w.grad).all() and (h.grad[dropped] == 0).all()


def test_invalid_targets_send_nothing_through_logp_but_lse_and_entropy_do() -> None:
    hidden, weight, bias, _ = problem(4, 16, 100)
    target = torch.tensor([-1, 100, 2**40, -100])
    for invalid in ("nan", "zero"):
        h = hidden.clone().requires_grad_()
        out = vs.linear_logp(h, weight, target, bias, validate=False, invalid=invalid, return_lse=True)
        (grad,) = torch.autograd.grad(out.logp, h, torch.ones(4), retain_graph=True)
        assert (grad == 0).all()
        (grad,) = torch.autograd.grad(out.lse, h, torch.ones(4))
        want = torch.softmax(hidden.double() @ weight.double().T + bias.double(), -1) @ weight.double()
        torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-6)


def test_masked_and_padded_columns_and_poisoned_rows() -> None:
    hidden, weight, bias, target = problem(6, 16, 100)
    target = target % 40
    bias[40:60] = float("-inf")
    target[5] = 45  # a -inf target in a finite row: the other columns get -g p, its own 0
    weight = torch.cat([weight, torch.full((12, 16), float("nan"))])
    bias = torch.cat([bias, torch.full((12,), float("nan"))])
    h, w, b = (x.clone().requires_grad_() for x in (hidden, weight, bias))
    out = vs.linear_logp(h, w, target, b, real_vocab_size=100, return_lse=True, return_entropy=True)
    assert torch.isneginf(out.logp[5]) and torch.isfinite(out.entropy).all()
    torch.autograd.backward([out.logp, out.lse, out.entropy], [torch.randn(6) for _ in range(3)])
    for grad in (w.grad, b.grad):
        assert (grad[40:60] == 0).all() and (grad[100:] == 0).all() and torch.isfinite(grad).all()
    assert torch.isfinite(h.grad).all() and (h.grad[5] != 0).any()
    h, w = hidden.clone().requires_grad_(), weight[:100].clone().requires_grad_()
    h.data[2, 3] = float("nan")
    vs.linear_logp(h, w, target).sum().backward()
    assert torch.isnan(h.grad[2]).all() and torch.isfinite(h.grad[[0, 1, 3, 4, 5]]).all()
    dead = vs.linear_logp(h := hidden.clone().requires_grad_(), weight[:100], target, torch.full((100,), float("-inf")))
    dead.sum().backward()
    assert (h.grad == 0).all(), "a row all -inf has zero gradient"


def test_backward_elsewhere_again_and_after_the_inputs_are_gone() -> None:
    hidden, weight, bias, target = problem(17, 16, 200)
    gs = upstream(17)
    want = ours(hidden, weight, bias, target, gs)
    h, w, b = (x.clone().requires_grad_() for x in (hidden, weight, bias))
    out = vs.linear_logp(h * 1, w * 1, target, b * 1, return_lse=True, return_entropy=True)
    loss = (out.logp * gs[0] + out.lse * gs[1] + out.entropy * gs[2]).sum()
    loss.backward(retain_graph=True)
    for leaf, g in zip((h, w, b), want, strict=True):
        assert_same_bytes(leaf.grad, g)
        leaf.grad = None
    import threading

    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    for leaf, g in zip((h, w, b), want, strict=True):
        assert_same_bytes(leaf.grad, g, "from another thread")
    scalar = vs.linear_logp(h, w, target, b).sum()  # grad_output expanded from a scalar
    (grad,) = torch.autograd.grad(scalar, h)
    assert_same_bytes(grad, torch.autograd.grad(vs.linear_logp(h, w, target, b), h, torch.ones(17))[0])


def test_double_backward_raises_by_name() -> None:
    hidden, weight, _, target = problem(3, 4, 20)
    h = hidden.requires_grad_()
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(vs.linear_logp(h, weight, target).sum(), h, create_graph=True)


def test_weight_gradient_of_a_shard_is_the_slice_and_of_many_rows_stays_accurate() -> None:
    hidden, weight, bias, target = problem(4096, 16, 96)
    g = torch.randn(4096, generator=torch.Generator().manual_seed(5))
    zero = torch.zeros(4096)
    args = (hidden, weight, bias, target, (g, zero, zero))
    no_worse(ours(*args), plain(*args, torch.float32), plain(*args, torch.float64))


def test_weight_gradient_of_65536_rows() -> None:
    hidden, weight, bias, target = problem(65536, 8, 48)
    g = torch.randn(65536, generator=torch.Generator().manual_seed(5))
    zero = torch.zeros(65536)
    args = (hidden, weight, bias, target, (g, zero, zero))
    no_worse(ours(*args), plain(*args, torch.float32), plain(*args, torch.float64))


def test_a_row_of_grad_hidden_does_not_depend_on_the_batch() -> None:
    hidden, weight, bias, target = problem(65, 24, 500)
    gs = upstream(65)
    whole = ours(hidden, weight, bias, target, gs)[0]
    for size in (1, 2, 7, 31):
        for start in range(0, 65, size):
            rows = slice(start, start + size)
            part = ours(hidden[rows], weight, bias, target[rows], tuple(g[rows] for g in gs))[0]
            assert_same_bytes(part, whole[rows])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 5.0}])
def test_block_wise_gradients_do_not_depend_on_the_blocks(options, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of backends without a kernel of their own, in many blocks, against the CPU kernels'."""
    from vocabshard.kernels import blockwise, cpu

    hidden, weight, bias, target = problem(33, 24, 500)
    args = (hidden, weight, bias, target, upstream(33))
    want = ours(*args, **options)
    monkeypatch.setattr(cpu, "backward", blockwise.backward)
    monkeypatch.setattr(blockwise, "SCRATCH_ELEMENTS", 1 << 12)
    monkeypatch.setattr(blockwise, "ROWS", 20)
    for got, w in zip(ours(*args, **options), want, strict=True):
        assert (got - w).norm() < 1e-6 * w.norm()


def test_block_wise_scratch_is_bounded() -> None:
    from vocabshard.kernels.blockwise import SCRATCH_ELEMENTS, block

    for n in (1, 64, 4096, 10**6):
        for d in (1, 128, 4096, 16384):
            rows, columns = block(n, d)
            assert rows * columns <= SCRATCH_ELEMENTS and d * columns <= SCRATCH_ELEMENTS and columns % 16 == 0
