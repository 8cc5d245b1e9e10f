"""vocab_parallel_logp and batch_invariant_logp on this process alone: values, bytes, gradients, options."""

from __future__ import annotations

import pytest
import torch

import vocabshard as vs
from vocabshard.dist.fold import fold
from vocabshard.kernels import reference
from vocabshard.kernels.problem import LocalProblem, RowGrads, SavedRows
from vocabshard.testing import specification
from vocabshard.testing.compare import assert_same_bytes
from vocabshard.testing.inputs import stacked_hard_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def logits_and_targets(n: int, v: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, v, generator=g) * 4).to(dtype), torch.randint(0, v, (n,), generator=g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, v", [(1, 1), (15, 16), (17, 513), (255, 50)])
def test_equals_the_specification(n: int, v: int, dtype: torch.dtype) -> None:
    logits, target = logits_and_targets(n, v, dtype)
    records = specification.partials(logits.float(), target, True)
    want = specification.fold(records[None], target, -100, v, "nan")
    out = vs.batch_invariant_logp(logits, target, return_lse=True, return_entropy=True, return_max=True)
    assert_same_bytes(out.logp, want.logp)
    assert_same_bytes(out.lse, want.lse)
    assert_same_bytes(out.entropy, want.entropy)
    assert_same_bytes(out.maximum, logits.float().amax(1))


def test_hard_rows_equal_the_specification() -> None:
    for columns in (64, 96, 129):
        names, logits = stacked_hard_rows(columns)
        for place in (0, 7, columns - 1):
            target = torch.full((len(names),), place)
            want = specification.fold(specification.partials(logits, target, True)[None], target, -100, columns, "nan")
            out = vs.batch_invariant_logp(logits, target, return_lse=True, return_entropy=True)
            for i, name in enumerate(names):
                for a, b, what in zip(out[:3], want[:3], ("logp", "lse", "entropy"), strict=True):
                    assert_same_bytes(a[i], b[i], f"{what} of {name}, target {place}")


def test_rows_picks_in_any_order_and_twice() -> None:
    logits, target = logits_and_targets(9, 100)
    rows = torch.tensor([7, 0, 7, 3])
    x = logits.clone().requires_grad_()
    logp = vs.batch_invariant_logp(x, target[rows], rows=rows)
    assert_same_bytes(logp.detach(), vs.batch_invariant_logp(logits[rows], target[rows]))
    g = torch.tensor([1.0, -2.0, 0.5, 0.0])
    logp.backward(g)
    y = logits.clone().requires_grad_()
    vs.batch_invariant_logp(y[rows], target[rows]).backward(g)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-8)
    assert (x.grad[[1, 2, 4, 5, 6, 8]] == 0).all() and (x.grad[3] == 0).all()
    for bad in ([-1], [9]):
        with pytest.raises(ValueError, match="rows must lie in"):
            vs.batch_invariant_logp(logits, target[:1], rows=torch.tensor(bad))
    with pytest.raises(ValueError, match="as long"):
        vs.batch_invariant_logp(logits, target, rows=rows)


def test_out() -> None:
    logits, target = logits_and_targets(9, 100)
    out = torch.empty(9)
    assert vs.batch_invariant_logp(logits, target, out=out) is out
    assert_same_bytes(out, vs.batch_invariant_logp(logits, target))
    with pytest.raises(ValueError, match="out= cannot be differentiated"):
        vs.batch_invariant_logp(logits.clone().requires_grad_(), target, out=out)
    with pytest.raises(ValueError, match="out must be shaped"):
        vs.batch_invariant_logp(logits, target, out=out[:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_and_inplace(dtype: torch.dtype) -> None:
    logits, target = logits_and_targets(17, 333, dtype)
    target[3] = -100
    gs = [torch.randn(17), torch.randn(17), torch.randn(17)]
    x = logits.double().requires_grad_()
    logps = torch.log_softmax(x, -1)
    want = torch.where(target == -100, 0.0, logps.gather(1, target.clamp(min=0)[:, None])[:, 0])
    torch.autograd.backward([want, x.logsumexp(-1), -(logps.exp() * logps).sum(-1)], [g.double() for g in gs])

    def run(inplace: bool):
        leaf = logits.clone().requires_grad_()
        mine = leaf * 1
        out = vs.vocab_parallel_logp(mine, target, return_entropy=True, inplace_backward=inplace)
        kept = mine.detach().clone()
        torch.autograd.backward([out.logp, out.lse, out.entropy], gs)
        return leaf.grad, mine.detach(), kept

    grad, after, before = run(False)
    assert_same_bytes(after, before, "the logits are left alone")
    eps = torch.finfo(dtype).eps
    assert ((grad.double() - x.grad).abs() <= eps * x.grad.abs() + 2e-6).all()
    inplace, after, _ = run(True)
    assert_same_bytes(inplace, grad)
    assert_same_bytes(after, grad, "and with inplace_backward hold the gradient")


def test_inplace_notices_a_second_backward_and_a_change() -> None:
    logits, target = logits_and_targets(5, 50)
    x = logits.clone().requires_grad_() * 1
    logp = vs.vocab_parallel_logp(x, target, inplace_backward=True).logp.sum()
    logp.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="changed after the forward"):
        logp.backward()
    x = logits.clone().requires_grad_() * 1
    logp = vs.vocab_parallel_logp(x, target).logp.sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.backward()


def test_exact_zeros() -> None:
    logits, target = logits_and_targets(6, 100)
    logits[:, 90:] = float("nan")
    logits[:, 20:30] = float("-inf")
    target = target % 20
    target[2], target[4] = -100, 95
    x = logits.clone().requires_grad_()
    out = vs.vocab_parallel_logp(x, target, real_vocab_size=90, validate=False, invalid="zero")
    out.logp.backward(torch.tensor([1.0, 1, 1, 0, 1, 1]))
    assert (x.grad[:, 90:] == 0).all() and (x.grad[:, 20:30] == 0).all()
    assert (x.grad[[2, 3, 4]] == 0).all() and (x.grad[[0, 1, 5], :20] != 0).all()


def test_strides_and_shapes() -> None:
    logits, target = logits_and_targets(12, 50)
    want = vs.batch_invariant_logp(logits, target)
    wide = torch.full((12, 77), float("nan"))
    wide[:, 3:53] = logits
    assert_same_bytes(vs.batch_invariant_logp(wide[:, 3:53], target), want, "row stride, unaligned")
    assert_same_bytes(vs.batch_invariant_logp(logits.t().contiguous().t(), target), want, "transposed")
    assert_same_bytes(vs.batch_invariant_logp(logits.view(3, 4, 50), target.view(3, 4)), want.view(3, 4))
    assert_same_bytes(vs.batch_invariant_logp(logits[0], target[0]), want[0])
    assert_same_bytes(vs.batch_invariant_logp(logits, target.int()), want)
    x = wide.clone().requires_grad_()
    vs.batch_invariant_logp(x[:, 3:53], target).sum().backward()
    y = logits.clone().requires_grad_()
    vs.batch_invariant_logp(y, target).sum().backward()
    assert_same_bytes(x.grad[:, 3:53], y.grad)
    assert vs.batch_invariant_logp(logits[:0], target[:0]).shape == (0,)


def test_chunks_permutations_compaction() -> None:
    logits, target = logits_and_targets(129, 777)
    want = vs.batch_invariant_logp(logits, target)
    for size in (1, 7):
        parts = [vs.batch_invariant_logp(logits[i : i + size], target[i : i + size]) for i in range(0, 129, size)]
        assert_same_bytes(torch.cat(parts), want)
    order = torch.randperm(129, generator=torch.Generator().manual_seed(1))
    assert_same_bytes(vs.batch_invariant_logp(logits, target[order], rows=order), want[order])
    active = torch.arange(129) % 3 == 0
    assert_same_bytes(vs.batch_invariant_logp(logits[active], target[active]), want[active])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_vocabulary_of_padding_alone(backend: str) -> None:
    logits = torch.randn(3, 20).requires_grad_()
    out = vs.vocab_parallel_logp(
        logits, torch.full((3,), -100), real_vocab_size=0, return_entropy=True, backend=backend
    )
    assert torch.isneginf(out.lse).all() and (out.logp == 0).all() and (out.entropy == 0).all()
    out.logp.sum().backward()
    assert (logits.grad == 0).all()


def test_strict_refuses_the_torch_backend() -> None:
    logits, target = logits_and_targets(3, 20)
    out = vs.vocab_parallel_logp(logits, target, strict=True)
    assert out.provenance.projection_id == "given-logits" and out[1] is out.lse
    with pytest.raises(vs.ContractError):
        vs.vocab_parallel_logp(logits, target, strict=True, backend="torch")


@pytest.mark.parametrize("temperature", [None, 0.7, "rows"])
def test_the_torch_fallback_takes_rows_in_chunks(temperature: float | str | None) -> None:
    logits, target = logits_and_targets(7, 3001, torch.bfloat16)
    logits[3, ::2], logits[4] = float("-inf"), float("-inf")
    scale = torch.rand(7, generator=torch.Generator().manual_seed(1)) + 0.5 if temperature == "rows" else temperature
    rows = torch.tensor([5, 1, 5, 6, 0, 3, 4])
    problem = LocalProblem(0, 2999, None, True)
    g = [torch.randn(7, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for index in (None, rows):
        want = reference.logits_forward(logits, target, scale, problem, index)
        folded = fold("torch", want[None], target, -100, 2999, "nan")
        saved, grads = SavedRows(folded.lse2_int, folded.lse2_frac, folded.entropy), RowGrads(*g)
        gradients = []
        for size in (None, 1, 4):
            got = reference.logits_forward(logits, target, scale, problem, index, chunk_rows=size)
            assert_same_bytes(got, want, f"chunks of {size}")
            gradients.append(torch.full_like(logits, 7))
            reference.logits_backward(
                logits, target, scale, problem, saved, grads, gradients[-1], index, chunk_rows=size
            )
            assert_same_bytes(gradients[-1], gradients[0], f"gradient, chunks of {size}")


def test_the_torch_fallback_stays_within_its_workspace() -> None:
    for columns in (1, 50257, 151936, 1 << 20):
        chunks = reference._chunks(1 << 16, LocalProblem(0, columns, None, True), None)
        assert chunks[0].stop * columns * 64 <= reference.WORKSPACE
        assert [c.start for c in chunks[1:]] == [c.stop for c in chunks[:-1]] and chunks[-1].stop == 1 << 16
    logits, target = logits_and_targets(3, 20)
    with pytest.raises(ValueError, match="leading shape"):
        vs.batch_invariant_logp(logits, target[:2], backend="torch")
