"""linear_logp as a user calls it: values against fp64, bytes across batches, shards and entries."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.dist.fold import fold
from vocabshard.kernels import cpu
from vocabshard.kernels.problem import LocalProblem
from vocabshard.testing import specification
from vocabshard.testing.compare import assert_same_bytes, differing

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def problem(n: int, d: int, v: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g).to(dtype)
    weight = (torch.randn(v, d, generator=g) * (3 / max(d, 1) ** 0.5)).to(dtype)
    return hidden, weight, torch.randint(0, v, (n,), generator=g)


def everything(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options) -> vs.LogpOutput:
    out = vs.linear_logp(hidden, weight, target, bias, return_lse=True, return_entropy=True, **options)
    assert isinstance(out, vs.LogpOutput)
    return out


def sharded(hidden, weight, target, bounds, bias=None, *, real=None, softcap=None, temperature=None) -> list[Tensor]:
    """The same through simulated ranks: a local forward a slice, stacked, folded."""
    real = weight.shape[0] if real is None else real
    stacked = []
    for start, stop in itertools.pairwise(bounds):
        local = LocalProblem(start, min(max(real - start, 0), stop - start), softcap, True)
        part = None if bias is None else bias[start:stop]
        stacked.append(cpu.forward(hidden, weight[start:stop], part, target, temperature, local)[0])
    rows = fold("cpu", torch.stack(stacked), target, -100, real, "nan")
    return [rows.logp, rows.lse, rows.entropy]


def reference(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp64 from fp32 logits."""
    logp = torch.log_softmax(logits.double(), -1)
    entropy = -torch.where(logp.exp() > 0, logp.exp() * logp, 0.0).sum(-1)
    return logp.gather(-1, target[:, None])[:, 0], logits.double().logsumexp(-1), entropy


def ulp(x: Tensor) -> Tensor:
    x = x.abs().float()
    return (torch.nextafter(x, torch.tensor(float("inf"))) - x).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "n, d, v", [(1, 8, 50), (17, 100, 1000), (5, 1, 8), (3, 17, 1), (16, 2048, 333), (257, 8, 513)]
)
def test_values_against_fp64(n: int, d: int, v: int, dtype: torch.dtype) -> None:
    hidden, weight, target = problem(n, d, v, dtype)
    out = everything(hidden, weight, target, return_logits=True)
    assert out.logits.shape == (n, v)
    assert (out.logits.double() - hidden.double() @ weight.double().T).abs().max() < 3e-4
    logp, lse, entropy = reference(out.logits, target)
    torch_logp = torch.log_softmax(out.logits, -1).gather(-1, target[:, None])[:, 0].double()
    bar = torch.maximum((torch_logp - logp).abs().max(), 0.75 * ulp(logp))
    # within the target's own tile the contract's absolute error is at most 2e-7
    assert ((out.logp.double() - logp).abs() <= torch.clamp(bar, min=2e-7)).all()
    assert ((out.lse.double() - lse).abs() <= torch.clamp(0.75 * ulp(lse), min=2e-7)).all()
    assert (out.entropy.double() - entropy).abs().max() < 1e-6


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4, 1e5])
def test_offsets_do_not_cost_digits(offset: float) -> None:
    hidden, weight, target = problem(64, 32, 1000)
    out = everything(hidden, weight, target, torch.full((1000,), offset), return_logits=True)
    logp, lse, entropy = reference(out.logits, target)
    assert (out.entropy.double() - entropy).abs().max() < 1e-6
    theirs = torch.log_softmax(out.logits, -1).gather(-1, target[:, None])[:, 0].double()
    assert (out.logp.double() - logp).abs().max() <= torch.maximum((theirs - logp).abs().max(), 0.75 * ulp(logp).max())
    assert ((out.lse.double() - lse).abs() <= 0.75 * ulp(lse)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_anywhere_in_a_batch(dtype: torch.dtype) -> None:
    hidden, weight, target = problem(257, 48, 1000, dtype)
    whole = everything(hidden, weight, target)
    for size in (1, 7, 64):
        for start in range(0, 257, size):
            part = everything(hidden[start : start + size], weight, target[start : start + size])
            for a, b in zip(part[:3], whole[:3], strict=True):
                assert_same_bytes(a, b[start : start + size], f"rows {start}.. of {size}")
    order = torch.randperm(257, generator=torch.Generator().manual_seed(1))
    shuffled = everything(hidden[order], weight, target[order])
    for a, b in zip(shuffled[:3], whole[:3], strict=True):
        assert_same_bytes(a, b[order])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("v", [513, 1000, 2048])
def test_shard_boundaries_change_no_byte(v: int, seed: int) -> None:
    hidden, weight, target = problem(33, 48, v, seed=seed)
    whole = everything(hidden, weight, target)[:3]
    naive = 0
    logits = everything(hidden, weight, target, return_logits=True).logits
    plain = torch.logsumexp(logits, -1)
    layouts = [
        [0, v],
        [0, 256, v],
        [0, 16, 512, v],
        [0, 128, 256, 384, v],
        [0, 0, 16, v, v],
        [0, *(64 * i for i in range(1, 8)), v],
    ]
    for bounds in layouts:
        for a, b, what in zip(sharded(hidden, weight, target, bounds), whole, ("logp", "lse", "entropy"), strict=True):
            assert_same_bytes(a, b, f"{what} for {bounds}")
        pieces = [torch.logsumexp(logits[:, a:b], -1) for a, b in itertools.pairwise(bounds) if b > a]
        naive += differing(torch.logsumexp(torch.stack(pieces), 0), plain)
    assert naive > 0, "an ordinary fp32 log-sum-exp must differ here, or this test shows nothing"


@pytest.mark.parametrize("padding", [7, 24, 312])
def test_padding_changes_nothing_whatever_it_holds(padding: int) -> None:
    hidden, weight, target = problem(33, 48, 1000)
    bias = torch.randn(1000)
    want = everything(hidden, weight, target, bias)[:3]
    for fill in (0.0, 50.0, float("inf"), float("nan")):
        padded = torch.cat([weight, torch.full((padding, 48), fill)])
        padded_bias = torch.cat([bias, torch.full((padding,), fill)])
        got = everything(hidden, padded, target, padded_bias, real_vocab_size=1000, return_logits=True)
        for a, b in zip(got[:3], want, strict=True):
            assert_same_bytes(a, b, f"padding filled with {fill}")
        assert torch.isneginf(got.logits[:, 1000:]).all()
        for bounds in ([0, 512, 1000 + padding], [0, 992, 1000 + padding]):
            got2 = sharded(hidden, padded, target, bounds, padded_bias, real=1000)
            for a, b in zip(got2, want, strict=True):
                assert_same_bytes(a, b)


def test_peaked_rows_with_a_padded_vocabulary() -> None:
    """Padding must not add exp(0) where every real logit is far below 0 (log-probs up to +123 elsewhere)."""
    for shift in (-15.0, -130.0):
        weight = torch.full((1003, 1), shift)
        weight[5] = shift + 18
        padded = torch.cat([weight, torch.zeros(21, 1)])
        logp = vs.linear_logp(torch.ones(2, 1), padded, torch.tensor([5, 6]), real_vocab_size=1003)
        want = torch.log_softmax(weight.double().T, -1)[0, [5, 6]]
        assert (logp.double() - want).abs().max() < 2e-6 and (logp <= 0).all()


def test_the_projection_is_the_fma_chain() -> None:
    for dtype in DTYPES:
        hidden, weight, target = problem(5, 37, 50, dtype)
        out = everything(hidden, weight, target, return_logits=True)
        assert_same_bytes(out.logits, specification.fma_chain(hidden, weight))


@pytest.mark.parametrize("softcap", [None, 5.0, 30.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_records_equal_the_specification(softcap: float | None, entropy: bool) -> None:
    hidden, weight, target = problem(40, 16, 700)
    bias = torch.randn(700).to(torch.bfloat16)
    inverse = torch.rand(40) + 0.5
    records, logits = cpu.forward(
        hidden, weight, bias, target + 100, inverse, LocalProblem(100, 690, softcap, entropy), want_logits=True
    )
    z = specification.fma_chain(hidden, weight[:690]) + bias[:690].float()
    if softcap is not None:
        z = specification.softcap(z, softcap)
    assert_same_bytes(logits[:, :690], z, "logits")
    assert_same_bytes(records, specification.partials(z * inverse[:, None], target, entropy), "records")


@pytest.mark.parametrize("value", [0.55, 0.6, 0.7, 0.85, 1.05])
def test_one_temperature_one_answer(value: float) -> None:
    hidden, weight, target = problem(9, 16, 100)
    want = vs.linear_logp(hidden, weight, target, temperature=value)
    for other in (torch.tensor(value), torch.tensor([value]), torch.full((9,), value), torch.tensor(value).double()):
        assert_same_bytes(vs.linear_logp(hidden, weight, target, temperature=other), want)
    logits = vs.linear_logp(hidden, weight, target, temperature=value, return_logits=True).logits
    assert_same_bytes(vs.batch_invariant_logp(logits, target, temperature=value), want, "materialised")
    logp = torch.log_softmax(logits.double() / value, -1).gather(-1, target[:, None])[:, 0]
    assert (want.double() - logp).abs().max() < 2e-6
    assert_same_bytes(vs.linear_logp(hidden, weight, target, temperature=1.0), vs.linear_logp(hidden, weight, target))


def test_a_bad_temperature_in_a_row_makes_that_row_nan() -> None:
    hidden, weight, target = problem(6, 16, 100)
    t = torch.tensor([0.7, 0.0, -1.0, float("inf"), float("nan"), 1.3])
    logp = vs.linear_logp(hidden, weight, target, temperature=t, validate=False)
    assert torch.isnan(logp).tolist() == [False, True, True, True, True, False]
    with pytest.raises(ValueError, match="in row 1"):
        vs.linear_logp(hidden, weight, target, temperature=t)


def test_ignored_and_invalid_targets() -> None:
    hidden, weight, _ = problem(7, 16, 100)
    target = torch.tensor([-100, 3, -1, 100, 105, 2**31, 99])
    with pytest.raises(ValueError, match=r"target_ids\[2\] is -1"):
        vs.linear_logp(hidden, weight, target)
    logp = vs.linear_logp(hidden, weight, target, validate=False)
    assert logp[0] == 0 and torch.isnan(logp).tolist() == [False, False, True, True, True, True, False]
    zero = vs.linear_logp(hidden, weight, target, validate=False, invalid="zero")
    assert (zero[2:6] == 0).all() and torch.equal(zero[[1, 6]], logp[[1, 6]])
    # padding is no target
    logp = vs.linear_logp(hidden, weight, target, validate=False, real_vocab_size=99)
    assert torch.isnan(logp[6])
    # ignore_index may be a real id
    logp = vs.linear_logp(hidden, weight, torch.full((7,), 3), ignore_index=3)
    assert (logp == 0).all()
    lse = everything(hidden, weight, torch.full((7,), -100)).lse
    assert_same_bytes(lse, everything(hidden, weight, torch.zeros(7, dtype=torch.int64)).lse, "lse of ignored rows")


def test_shapes_dtypes_and_strides() -> None:
    hidden, weight, target = problem(12, 16, 100)
    want = vs.linear_logp(hidden, weight, target)
    assert_same_bytes(vs.linear_logp(hidden.view(3, 4, 16), weight, target.view(3, 4)), want.view(3, 4))
    assert_same_bytes(vs.linear_logp(hidden[0], weight, target[0]), want[0])
    assert_same_bytes(vs.linear_logp(hidden, weight, target.int()), want)
    assert_same_bytes(vs.linear_logp(hidden.t().contiguous().t(), weight, target), want, "transposed")
    wide = torch.randn(12, 37)
    wide[:, 3:35:2] = hidden
    assert_same_bytes(vs.linear_logp(wide[:, 3:35:2], weight, target), want, "strided")
    assert_same_bytes(vs.linear_logp(hidden, weight.t().contiguous().t(), target), want, "transposed weight")
    doubled = torch.stack([target, target], 1).reshape(-1)
    assert_same_bytes(vs.linear_logp(hidden, weight, doubled[::2]), want, "target_ids[::2]")
    assert_same_bytes(
        vs.linear_logp(hidden[:1].expand(12, 16), weight, target),
        vs.linear_logp(hidden[:1].repeat(12, 1), weight, target),
    )
    bias = torch.randn(100)
    assert_same_bytes(
        vs.linear_logp(hidden, weight, target, bias.repeat_interleave(2)[::2]),
        vs.linear_logp(hidden, weight, target, bias),
    )


def test_empty_problems() -> None:
    hidden, weight, target = problem(4, 16, 100)
    assert vs.linear_logp(hidden[:0], weight, target[:0]).shape == (0,)
    assert vs.linear_logp(hidden.view(2, 2, 16)[:, :0], weight, target.view(2, 2)[:, :0]).shape == (2, 0)
    out = everything(hidden, weight[:0], target, validate=False)
    assert torch.isnan(out.logp).all() and torch.isneginf(out.lse).all() and (out.entropy == 0).all()
    flat = vs.linear_logp(hidden[:, :0], weight[:, :0], target)
    assert (flat.double() + torch.tensor(100.0).double().log()).abs().max() < 1e-6
    grads = torch.autograd.grad(vs.linear_logp(hidden[:0].requires_grad_(), w := weight.clone().requires_grad_(),
                                               target[:0]).sum(), [w])  # fmt: skip
    assert (grads[0] == 0).all()


def test_autocast_casts_both() -> None:
    hidden, weight, target = problem(9, 16, 100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = vs.linear_logp(hidden, weight.bfloat16(), target)
    assert_same_bytes(got, vs.linear_logp(hidden.bfloat16(), weight.bfloat16(), target))
    with pytest.raises(TypeError, match="cast one"):
        vs.linear_logp(hidden, weight.bfloat16(), target)


def test_grad_mode_and_extra_outputs_change_no_byte() -> None:
    hidden, weight, target = problem(33, 16, 300)
    want = vs.linear_logp(hidden, weight, target)
    with torch.no_grad():
        assert_same_bytes(vs.linear_logp(hidden, weight, target), want)
    assert_same_bytes(vs.linear_logp(hidden.requires_grad_(), weight.requires_grad_(), target).detach(), want)
    assert_same_bytes(everything(hidden, weight, target, return_logits=True).logp.detach(), want)
    assert_same_bytes(vs.VocabParallelLinearLogp(return_lse=True)(hidden, weight, target).logp.detach(), want)


def test_both_entries_give_the_same_bytes() -> None:
    hidden, weight, target = problem(33, 16, 333)
    out = everything(hidden, weight, target, return_logits=True, temperature=0.7)
    given = vs.vocab_parallel_logp(out.logits, target, temperature=0.7, return_entropy=True)
    for a, b in zip(given[:3], out[:3], strict=True):
        assert_same_bytes(a, b)


def test_weight_changed_in_place_is_seen() -> None:
    hidden, weight, target = problem(9, 16, 100)
    vs.linear_logp(hidden, weight, target)
    weight.mul_(0.5)
    assert_same_bytes(vs.linear_logp(hidden, weight, target), vs.linear_logp(hidden, weight.clone(), target))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_special_values_stay_in_their_row(backend: str) -> None:
    hidden, weight, target = problem(8, 16, 100)
    want = everything(hidden, weight, target, backend=backend)
    for bad in (float("nan"), float("inf")):
        broken = hidden.clone()
        broken[3, 2] = bad
        got = everything(broken, weight, target, backend=backend)
        keep = torch.arange(8) != 3
        assert all(torch.isnan(x[3]) for x in got[:3])
        for a, b in zip(got[:3], want[:3], strict=True):
            assert_same_bytes(a[keep], b[keep])
    bias = torch.zeros(100)
    bias[50:] = float("-inf")
    got = everything(hidden, weight, target % 50, bias, backend=backend)
    want = everything(hidden, weight[:50], target % 50, backend=backend)
    for a, b in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    out = everything(hidden, weight, target, torch.full((100,), float("-inf")), backend=backend)
    assert torch.isneginf(out.lse).all() and torch.isneginf(out.logp).all() and (out.entropy == 0).all()


def test_torch_backend_agrees_in_value() -> None:
    hidden, weight, target = problem(33, 16, 333)
    bias = torch.randn(333)
    for options in ({}, {"temperature": 0.7}, {"softcap": 5.0}, {"real_vocab_size": 320}):
        target = target % 320
        a = everything(hidden, weight, target, bias, **options)
        b = everything(hidden, weight, target, bias, backend="torch", **options)
        for x, y in zip(a[:3], b[:3], strict=True):
            torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)


def test_strict_and_provenance() -> None:
    hidden, weight, target = problem(5, 16, 100)
    out = everything(hidden, weight, target, strict=True, contract="vocabshard-logp-v1")
    p = out.provenance
    assert (p.backend, p.projection_id, p.contract_bearing) == ("cpu", "fma-chain", True)
    assert p == vs.provenance(hidden, weight, target, return_lse=True, return_entropy=True)
    with pytest.raises(vs.ContractError, match=r"F\.linear"):
        vs.linear_logp(hidden, weight, target, backend="torch", strict=True)
    with pytest.raises(vs.ContractError, match="was asked for"):
        vs.linear_logp(hidden, weight, target, contract="vocabshard-logp-v0")
    assert not vs.provenance(hidden, weight, target, backend="torch").contract_bearing
