"""Faults that users of operators like these reported in public, where no other file has them already."""

from __future__ import annotations

import itertools

import pytest
import torch

import vocabshard as vs
from vocabshard.dist.fold import fold
from vocabshard.kernels import cpu
from vocabshard.kernels.problem import LocalProblem
from vocabshard.testing.compare import assert_same_bytes


def test_a_target_just_past_a_shard_of_an_odd_size() -> None:
    """It must not hit a padded column of the shard before it."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(8, 12, generator=g), torch.randn(200, 12, generator=g)
    target = torch.tensor([0, 99, 100, 101, 111, 112, 127, 199])
    stacked = [
        cpu.forward(hidden, weight[a : a + 100], None, target, None, LocalProblem(a, 100, None, False))[0]
        for a in (0, 100)
    ]
    got = fold("cpu", torch.stack(stacked), target, -100, 200, "nan").logp
    torch.testing.assert_close(got, vs.linear_logp(hidden, weight, target), rtol=1e-6, atol=1e-6)


def test_only_the_last_row_counts() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 12, generator=g), torch.randn(200, 12, generator=g)
    target = torch.full((300,), -100)
    target[-1] = 7
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logp = vs.linear_logp(h, w, target)
    logp.sum().backward()
    h1, w1 = hidden[-1:].clone().requires_grad_(), weight.clone().requires_grad_()
    alone = vs.linear_logp(h1, w1, target[-1:])
    alone.sum().backward()
    assert_same_bytes(logp[-1:], alone)
    assert (logp[:-1] == 0).all() and (h.grad[:-1] == 0).all()
    assert_same_bytes(h.grad[-1:], h1.grad)
    assert_same_bytes(w.grad, w1.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_over_65536_rows(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(65536, 8, generator=g).to(dtype), torch.randn(48, 8, generator=g).to(dtype)
    target, up = torch.randint(0, 48, (65536,), generator=g), torch.randn(65536, generator=g)
    w = weight.clone().requires_grad_()
    vs.linear_logp(hidden, w, target).backward(up)

    def plain(d: torch.dtype) -> torch.Tensor:
        leaf = weight.to(d, copy=True).requires_grad_()
        logp = torch.log_softmax(hidden.to(d) @ leaf.T, -1).gather(1, target[:, None])[:, 0]
        logp.backward(up.to(d))
        return leaf.grad

    want = plain(torch.float64)
    rounding = torch.finfo(dtype).eps / 2 * want.abs()
    bar = (plain(torch.float32).double() - want).norm() + (rounding.norm() if dtype != torch.float32 else 0)
    assert (w.grad.double() - want).norm() <= bar


def test_more_than_2_to_the_31_logits() -> None:
    rows, columns = 66_000, 32_768
    hidden, weight = torch.randn(rows, 1).clamp(-3, 3), torch.randn(columns, 1)
    target = torch.randint(0, columns, (rows,))
    last = slice(rows - 40, rows)
    logp = vs.linear_logp(hidden, weight, target, validate=False)
    assert_same_bytes(logp[last], vs.linear_logp(hidden[last], weight, target[last]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offsets_past_2_to_the_31_elements(dtype: torch.dtype) -> None:
    """Rows so far apart that 32-bit offsets wrap; the memory between them is never touched."""
    far = 2**28 + 8
    hidden = torch.empty(17 * far, dtype=dtype).as_strided((17, 24), (far, 1))
    weight = torch.empty(17 * far, dtype=dtype).as_strided((17, 24), (far, 1))
    hidden.copy_(torch.randn(17, 24))
    weight.copy_(torch.randn(17, 24))
    target = torch.arange(17)
    h, w = hidden.contiguous().requires_grad_(), weight.contiguous().requires_grad_()
    want = vs.linear_logp(h, w, target)
    want.sum().backward()
    got = vs.linear_logp(hidden.requires_grad_(), weight.requires_grad_(), target)
    assert_same_bytes(got, want)
    grads = torch.autograd.grad(got.sum(), [hidden, weight])
    assert_same_bytes(grads[0], h.grad)
    assert_same_bytes(grads[1], w.grad)
    logits = torch.empty(17 * far, dtype=dtype).as_strided((17, 100), (far, 1))
    logits.copy_(torch.randn(17, 100))
    assert_same_bytes(vs.batch_invariant_logp(logits, target), vs.batch_invariant_logp(logits.contiguous(), target))


@pytest.mark.parametrize("d", [1, 8, 100, 2047, 5120, 7168, 8192])
@pytest.mark.parametrize("v", [8, 40])
def test_hidden_sizes_and_small_vocabularies(d: int, v: int) -> None:
    g = torch.Generator().manual_seed(d)
    hidden, weight = torch.randn(5, d, generator=g), torch.randn(v, d, generator=g) / d**0.5
    target = torch.randint(0, v, (5,), generator=g)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    got = vs.linear_logp(h, w, target)
    z = h.detach().double() @ w.detach().double().T
    want = torch.log_softmax(z, -1).gather(1, target[:, None])[:, 0]
    error = 1e-6 + 1e-7 * d**0.5  # one chain of d roundings of numbers near 1
    assert (got.double() - want).abs().max() < error
    got.sum().backward()
    p = torch.softmax(z, -1)
    dz = torch.nn.functional.one_hot(target, v) - p
    torch.testing.assert_close(h.grad.double(), dz @ w.detach().double(), rtol=2e-5, atol=error)
    torch.testing.assert_close(w.grad.double(), dz.T @ h.detach().double(), rtol=2e-5, atol=error)


def test_eight_ranks_with_an_empty_last_shard() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 12, generator=g), torch.randn(100, 12, generator=g)
    target = torch.randint(0, 100, (9,), generator=g)
    bounds = [0, 16, 32, 48, 64, 80, 96, 100, 100]
    stacked = [
        cpu.forward(hidden, weight[a:b], None, target, None, LocalProblem(a, b - a, None, True))[0]
        for a, b in itertools.pairwise(bounds)
    ]
    rows = fold("cpu", torch.stack(stacked), target, -100, 100, "nan")
    want = vs.linear_logp(hidden, weight, target, return_entropy=True, return_lse=True)
    for a, b in ((rows.logp, want.logp), (rows.lse, want.lse), (rows.entropy, want.entropy)):
        assert_same_bytes(a, b)


def test_zero_hidden_states_and_a_bias_of_zeros() -> None:
    hidden, weight = torch.zeros(3, 12), -torch.rand(50, 12) - 0.1
    target = torch.tensor([0, 1, 2])
    out = vs.linear_logp(hidden, weight, target, return_logits=True)
    assert not torch.signbit(out.logits).any()
    assert_same_bytes(out.logp, vs.linear_logp(hidden, weight, target, torch.zeros(50)))
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 12, generator=g)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same_bytes(
            vs.linear_logp(hidden, weight, target, torch.zeros(50, dtype=dtype)), vs.linear_logp(hidden, weight, target)
        )


def test_flush_to_zero_changes_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 12, generator=g) * 1e-20, torch.randn(60, 12, generator=g) * 1e-20
    bias = torch.randn(60, generator=g) * 1e-39
    target = torch.arange(5)
    want = vs.linear_logp(hidden, weight, target, bias, return_logits=True)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        got = vs.linear_logp(hidden, weight, target, bias, return_logits=True)
        probe = torch.tensor([1e-39]) * torch.tensor([0.5])
    finally:
        torch.set_flush_denormal(False)
    assert float(probe) == 0, "the caller's mode is restored"
    assert_same_bytes(got.logits, want.logits)
    assert (want.logits != 0).any()
    assert_same_bytes(got.logp, want.logp)


def test_tensors_without_storage_are_refused_by_name() -> None:
    hidden, target = torch.randn(3, 4), torch.tensor([0, 1, 2])
    freed = torch.randn(20, 4)
    freed.untyped_storage().resize_(0)
    for validate in (None, False):
        with pytest.raises(ValueError, match="weight has no storage"):
            vs.linear_logp(hidden, freed, target, validate=validate)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3, 20)
    with pytest.raises((ValueError, TypeError), match="logits"):
        vs.batch_invariant_logp(fake, target, validate=False)


def test_rows_out_of_range_never_read_memory() -> None:
    logits = torch.randn(3, 20)
    for bad in (3, -1, 2**40):
        with pytest.raises(ValueError, match="rows must lie in"):
            vs.batch_invariant_logp(logits, torch.tensor([0]), validate=False, rows=torch.tensor([bad]))


def test_overlapping_rows_cannot_be_overwritten() -> None:
    logits = torch.randn(1, 20).expand(3, 20)
    target = torch.tensor([0, 1, 2])
    vs.vocab_parallel_logp(logits, target)
    with pytest.raises(ValueError, match="do not overlap"):
        vs.vocab_parallel_logp(logits, target, inplace_backward=True)


def test_lazy_negation_is_seen() -> None:
    z = torch.randn(3, 4, dtype=torch.complex64)
    hidden, weight, target = z.conj().imag, torch.randn(20, 4), torch.tensor([0, 1, 2])
    assert hidden.is_neg()
    assert_same_bytes(vs.linear_logp(hidden, weight, target), vs.linear_logp(hidden.clone(), weight, target))
    logits = torch.randn(3, 20, dtype=torch.complex64).conj().imag
    assert_same_bytes(vs.batch_invariant_logp(logits, target), vs.batch_invariant_logp(logits.clone(), target))


def test_flush_to_zero_does_not_reach_the_temperature() -> None:
    logits, target = torch.randn(3, 20) * 1e38, torch.tensor([0, 1, 2])
    big = [2e38, torch.tensor(2e38), torch.full((3,), 2e38)]
    want = vs.batch_invariant_logp(logits, target, temperature=2e38)
    torch.set_flush_denormal(True)
    try:
        got = [vs.batch_invariant_logp(logits, target, temperature=t) for t in big]
    finally:
        torch.set_flush_denormal(False)
    for logp in got:
        assert_same_bytes(logp, want)
    with pytest.raises(ValueError, match="too small"):
        vs.batch_invariant_logp(logits, target, temperature=1e-40)
    with pytest.raises(ValueError, match="reciprocal too"):
        vs.batch_invariant_logp(logits, target, temperature=torch.full((3,), 1e-40))
    with pytest.raises(ValueError, match="positive and finite"):
        vs.batch_invariant_logp(logits, target, temperature=10**400)


def test_no_rows_with_entropy() -> None:
    out = vs.batch_invariant_logp(torch.randn(0, 20), torch.zeros(0, dtype=torch.int64), return_entropy=True)
    assert out.logp.shape == out.entropy.shape == (0,)


def test_torch_backend_under_autocast_keeps_its_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 12, generator=g), torch.randn(60, 12, generator=g)

    def grad(inside: bool) -> torch.Tensor:
        h = hidden.clone().requires_grad_()
        logp = vs.linear_logp(h, weight, torch.arange(5), backend="torch").sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            logp.backward()
        return h.grad

    assert_same_bytes(grad(True), grad(False))


def test_a_module_can_be_copied() -> None:
    import copy

    op = copy.deepcopy(vs.VocabParallelLinearLogp(temperature=0.7))
    assert op.options == {"temperature": 0.7}
