"""The Hopper kernels: bytes equal to the specification's, to Triton's, and to themselves however a problem is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.dist.fold import fold
from vocabshard.kernels.problem import LocalProblem
from vocabshard.testing import specification
from vocabshard.testing.compare import assert_same_bytes, differing
from vocabshard.testing.inputs import stacked_hard_rows

pytestmark = pytest.mark.needs("sm90")

WGMMA = ("rows64", "rows128")
INF = float("inf")


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def problem(
    n: int, d: int, v: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, spread: float = 3.0
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(n, d, generator=g).to(dtype)
    weight = (torch.randn(v, d, generator=g) * (spread / max(d, 1) ** 0.5)).to(dtype)
    return hidden, weight, torch.randint(0, v, (n,), generator=g)


def local(
    hidden, weight, target, bias=None, temperature=None, *, start=0, valid=None, softcap=None, entropy=True, **how
):
    from vocabshard.kernels import sm90

    share = LocalProblem(start, weight.shape[0] if valid is None else valid, softcap, entropy)
    return sm90.forward(hidden, weight, bias, target, temperature, share, **how)


def chain(hidden: Tensor, weight: Tensor) -> Tensor:
    """The projection, fp32 [N, V], by the kernel that shares nothing with TMA and wgmma."""
    target = torch.zeros(hidden.shape[0], dtype=torch.int64)
    path = "fma" if hidden.dtype == torch.float32 else "mma"
    logits = local(hidden, weight, target, path=path, want_logits=True, entropy=False)[1]
    assert logits is not None
    return logits


def expected(z, target, bias=None, temperature=None, *, start=0, valid=None, softcap=None, entropy=True):
    """Records and logits by the specification."""
    valid = z.shape[1] if valid is None else valid
    y = z if bias is None else z + bias.float()
    if softcap is not None:
        y = specification.softcap(y, softcap)
    logits = y.clone()
    logits[:, valid:] = -INF
    if temperature is not None:
        scale = temperature[:, None] if isinstance(temperature, Tensor) else torch.tensor(temperature)
        y = y * scale
    y = y.clone()
    y[:, valid:] = -INF
    here = target - start
    here = torch.where((here >= 0) & (here < valid), here, torch.full_like(here, -1))
    return specification.partials(y, here, entropy), logits


def everything(hidden, weight, target, bias=None, backend="sm90", **options) -> vs.LogpOutput:
    out = vs.linear_logp(hidden, weight, target, bias, return_lse=True, return_entropy=True, backend=backend, **options)
    assert isinstance(out, vs.LogpOutput)
    return out


def same(a: vs.LogpOutput, b: vs.LogpOutput, what: str) -> None:
    for name in ("logp", "lse", "entropy", "logits"):
        assert_same_bytes(getattr(a, name), getattr(b, name), f"{name}, {what}")


# ---- against the specification ----


@pytest.mark.parametrize("path", ["rows64", "rows128", "mma", "auto"])
@pytest.mark.parametrize(
    "n, d, v", [(1, 8, 8), (15, 64, 100), (16, 72, 191), (17, 200, 4099), (65, 64, 1), (255, 8, 385)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_launch_gives_the_specifications_bytes(path: str, n: int, d: int, v: int, dtype: torch.dtype) -> None:
    hidden, weight, target = problem(n, d, v, dtype, seed=n)
    z = chain(hidden, weight)
    bias = torch.randn(v)
    rows = torch.rand(n) + 0.5
    for options in (
        {},
        {"entropy": False},
        {"bias": bias.bfloat16(), "temperature": 1.25},
        {"bias": bias, "temperature": rows, "softcap": 2.5, "entropy": False},
        {"valid": max(v - 7, 0), "start": 1 << 33},
    ):
        ids = target + options.get("start", 0)
        want, logits = expected(z, ids, **options)
        assert_same_bytes(local(hidden, weight, ids, path=path, **options)[0], want, f"records, {options.keys()}")
        got = local(hidden, weight, ids, path=path, want_logits=True, **options)
        assert_same_bytes(got[0], want, f"records beside logits, {options.keys()}")
        assert_same_bytes(got[1], logits, f"logits, {options.keys()}")


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("n, v", [(257, 50257), (16, 128256), (17, 129920), (255, 151936)])
def test_vocabularies_of_models(n: int, v: int, seed: int) -> None:
    hidden, weight, target = problem(n, 64, v, seed=seed)
    want, _ = expected(chain(hidden, weight), target)
    for path in (*WGMMA, "auto"):
        assert_same_bytes(local(hidden, weight, target, path=path)[0], want, path)


def test_bits_of_a_bare_matrix_product() -> None:
    """The projection is that of the library where the library does not split the depth."""
    hidden, weight, target = problem(512, 2048, 4096)
    logits = local(hidden, weight, target, path="rows128", want_logits=True)[1]
    assert_same_bytes(logits, torch.mm(hidden, weight.T, out_dtype=torch.float32))


@pytest.mark.parametrize("n", [1, 65, 200])
def test_hard_rows(n: int) -> None:
    """Whatever y may be: given as an fp32 bias on logits of 0, in every place of a block of rows."""
    with torch.device("cpu"):
        names, rows = stacked_hard_rows(192)
    hidden, weight = torch.zeros(n, 8, dtype=torch.bfloat16), torch.zeros(192, 8, dtype=torch.bfloat16)
    target = torch.arange(n) % 192
    for name, row in zip(names, rows.cuda(), strict=True):
        for entropy in (True, False):
            for scale in (None, 1 / 0.55):
                want, _ = expected(torch.zeros(n, 192), target, row, scale, entropy=entropy)
                got, _ = local(hidden, weight, target, row, scale, entropy=entropy)
                assert_same_bytes(got, want, f"{name}, entropy {entropy}, scale {scale}")
        pieces = ((0, 16), (16, 48), (48, 48), (48, 192))
        cuts = torch.stack([local(hidden, weight[a:b], target, row[a:b], start=a)[0] for a, b in pieces])
        whole = local(hidden, weight, target, row)[0][None]
        got, want = (fold("sm90", records, target, -100, 192, "nan") for records in (cuts, whole))
        for part, a, b in zip(got._fields, got, want, strict=True):
            assert_same_bytes(a, b, f"{name}, {part} of shards")


@pytest.mark.parametrize("cap", [0.01, 5.0, 30.0, 1e15])
def test_softcap_of_every_size_of_logit(cap: float) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    row = torch.randn(4096, generator=g) * torch.exp2(torch.randint(-140, 120, (4096,), generator=g).float())
    row[:4096:256] = torch.tensor([0.0, -0.0, INF, -INF] * 4)
    hidden, weight = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(4096, 8, dtype=torch.bfloat16)
    target = torch.arange(3)
    _, logits = local(hidden, weight, target, row, softcap=cap, want_logits=True)
    assert_same_bytes(logits, specification.softcap(torch.zeros(3, 4096) + row, cap))
    ordinary = torch.randn(3, 4096, generator=g) * 3 * cap
    _, logits = local(hidden, weight, target, ordinary[0], softcap=cap, want_logits=True)
    assert_same_bytes(logits, specification.softcap(torch.zeros(3, 4096) + ordinary[0], cap))


@pytest.mark.parametrize("d", [1, 8, 100, 513])
def test_fp32_is_the_cpus_chain(d: int) -> None:
    hidden, weight, target = problem(77, d, 1000, torch.float32)
    bias = torch.randn(1000)
    options = {"return_logits": True, "temperature": 0.7}
    got = everything(hidden, weight, target, bias, **options)
    with torch.device("cpu"):
        want = everything(hidden.cpu(), weight.cpu(), target.cpu(), bias.cpu(), "cpu", **options)
    same(got, want, f"D = {d}")


# ---- against itself ----


def test_a_row_is_the_same_in_every_batch_and_at_every_place() -> None:
    hidden, weight, target = problem(1024, 64, 777)
    whole = local(hidden, weight, target)[0]
    for n in range(1, 1025):
        rows = (torch.arange(n) * 7 + n) % 1024
        got = local(hidden[rows], weight, target[rows])[0]
        assert torch.equal(got, whole[:, rows]), f"N = {n}"
    for n in (1, 2, 64, 65, 128, 129, 257, 1024):
        got = local(hidden[:1].expand(n, -1).contiguous(), weight, target[:1].expand(n).contiguous())[0]
        assert torch.equal(got, whole[:, :1].expand(-1, n)), f"one row {n} times"


def layouts(v: int) -> dict[str, list[int]]:
    padded = -(-v // 1024) * 1024  # Megatron, 8 ranks
    vllm = -(-v // 64) * 64
    return {
        "1": [0, v],
        "2": [0, v // 32 * 16, v],
        "3, uneven": [0, 16, v // 48 * 16, v],
        "4": [0, *(v // 64 * 16 * k for k in range(1, 4)), v],
        "8": [0, *(v // 128 * 16 * k for k in range(1, 8)), v],
        "8, some empty": [0, 0, 16, 16, 4096, v, v, v, v],
        "8, padded like Megatron's": [padded // 8 * k for k in range(9)],
        "4, padded like vLLM's": [vllm // 4 * k for k in range(5)],
    }


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("n, v", [(17, 50257), (257, 50257), (65, 151936)])
def test_shards_change_no_byte(n: int, v: int, seed: int) -> None:
    hidden, weight, target = problem(n, 64, v, seed=seed)
    bias = torch.randn(v)
    want = everything(hidden, weight, target, bias, softcap=20.0)
    logits = chain(hidden, weight) + bias
    plain, naive = torch.logsumexp(logits, -1), 0
    for name, bounds in layouts(v).items():
        if any(b % 16 for b in bounds[1:-1]):
            continue
        parts = []
        for start, stop in itertools.pairwise(bounds):
            real = min(max(v - start, 0), stop - start)
            w, b = weight[start:stop], bias[start:stop]
            if real < stop - start:  # padding holds anything
                w = torch.cat([w, w.new_full((stop - start - real, 64), float("nan"))])
                b = torch.cat([b, b.new_full((stop - start - real,), INF)])
            parts.append(local(hidden, w, target, b, start=start, valid=real, softcap=20.0)[0])
        got = fold("sm90", torch.stack(parts), target, -100, v, "nan")
        for part in ("logp", "lse", "entropy"):
            assert_same_bytes(getattr(got, part), getattr(want, part), f"{part}, shards {name}")
        pieces = [logits[:, a : min(b, v)] for a, b in itertools.pairwise(bounds) if a < min(b, v)]
        naive += differing(torch.logsumexp(torch.stack([torch.logsumexp(p, -1) for p in pieces]), 0), plain)
    assert naive > 0, "an ordinary log-sum-exp must differ here, or this test shows nothing"


def test_logits_asked_for_or_not() -> None:
    for n in (1, 64, 65, 300):
        hidden, weight, target = problem(n, 128, 5003)
        a, b = everything(hidden, weight, target), everything(hidden, weight, target, return_logits=True)
        same(a, b._replace(logits=None), f"N = {n}")
        assert_same_bytes(b.logits, chain(hidden, weight))


@pytest.mark.needs("triton")
@pytest.mark.parametrize(
    "n, d, v",
    # the last: clusters that share rows, many turns of the ring, and at the end a tile of which one CTA has nothing
    [(1, 128, 50257), (64, 256, 9496), (130, 64, 4099), (300, 100, 1000), (513, 2048, 8192), (300, 2048, 50432)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_of_the_triton_backend(n: int, d: int, v: int, dtype: torch.dtype) -> None:
    hidden, weight, target = problem(n, d if dtype != torch.float32 else min(d, 128), v, dtype)
    bias = torch.randn(v).to(dtype)
    for options in ({}, {"temperature": torch.rand(n) + 0.5, "softcap": 4.0, "return_logits": True}):
        a = everything(hidden, weight, target, bias, **options)
        same(a, everything(hidden, weight, target, bias, "triton", **options), str(options.keys()))


def test_more_rows_than_a_launch_takes() -> None:
    hidden, weight, target = problem(9000, 64, 1000)
    whole = local(hidden, weight, target)[0]
    for rows in (slice(0, 100), slice(4090, 4700), slice(8990, 9000)):
        assert_same_bytes(local(hidden[rows], weight, target[rows])[0], whole[:, rows].contiguous())


# ---- streams, graphs, devices ----


def test_captured_in_a_graph() -> None:
    for n in (3, 300):
        hidden, weight, target = problem(n, 256, 5003)
        eager = everything(hidden, weight, target)
        other = problem(n, 256, 5003, seed=1)
        want = everything(*other)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            out = everything(hidden, weight, target)
        graph.replay()
        same(out, eager, "first replay")
        for buffer, values in zip((hidden, weight, target), other, strict=True):
            buffer.copy_(values)
        graph.replay()
        same(out, want, "replay on other inputs")


def test_on_the_callers_stream() -> None:
    hidden, weight, target = problem(200, 512, 20000)
    want = everything(hidden, weight, target)
    side = torch.cuda.Stream()
    late = torch.full_like(hidden, float("nan"))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(hidden)
        got = everything(late, weight, target)
    torch.cuda.current_stream().wait_stream(side)
    same(got, want, "side stream")


def test_a_thousand_times_beside_a_busy_stream() -> None:
    busy = torch.cuda.Stream()
    a = torch.randn(2048, 2048, dtype=torch.bfloat16)
    for n in (16, 130):
        hidden, weight, target = problem(n, 256, 9496)
        want = local(hidden, weight, target)[0]
        wrong = torch.zeros((), dtype=torch.int64)
        for i in range(1000):
            if i % 10 == 0:
                with torch.cuda.stream(busy):
                    torch.mm(a, a)
            wrong += (local(hidden, weight, target)[0] != want).sum()
        assert int(wrong) == 0, f"N = {n}"


def test_nothing_waits_for_the_gpu() -> None:
    hidden, weight, target = problem(100, 64, 1000)
    everything(hidden, weight, target)
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(hidden, weight, target)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.needs("multigpu")
def test_on_a_device_that_is_not_the_current_one() -> None:
    hidden, weight, target = problem(100, 64, 1000)
    want = everything(hidden, weight, target)
    got = everything(*(t.to("cuda:1") for t in (hidden, weight, target)))
    assert got.logp.device.index == 1 and torch.cuda.current_device() == 0
    for name in ("logp", "lse", "entropy"):
        assert_same_bytes(getattr(got, name).to("cuda:0"), getattr(want, name), name)


def test_memory_beyond_inputs_and_outputs() -> None:
    for n, entropy in ((4096, True), (4096, False), (1, False)):
        hidden, weight, target = problem(n, 64, 50257)
        local(hidden, weight, target, entropy=entropy)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        local(hidden, weight, target, entropy=entropy)
        assert torch.cuda.max_memory_allocated() - before <= 64 << 20


# ---- what others tripped over ----


def test_peaked_rows_in_a_padded_vocabulary() -> None:
    for v, real in ((129920, 128256), (152064, 151936)):
        weight = torch.full((v, 8), -15.0 / 8, dtype=torch.bfloat16)
        weight[5] = 3.0 / 8
        weight[real:] = 0
        hidden, target = torch.ones(3, 8, dtype=torch.bfloat16), torch.tensor([5, 6, real - 1])
        out = everything(hidden, weight, target, real_vocab_size=real)
        want = torch.log_softmax((hidden.double() @ weight[:real].double().T), -1).gather(1, target[:, None])[:, 0]
        assert (out.logp.double() - want).abs().max() < 1e-5 and (out.logp <= 0).all()


def test_a_target_just_past_a_shard_of_an_odd_size() -> None:
    hidden, weight, _ = problem(8, 64, 200)
    target = torch.tensor([0, 99, 100, 101, 111, 112, 127, 199])
    parts = [local(hidden, weight[a : a + 100], target, start=a, entropy=False)[0] for a in (0, 100)]
    got = fold("sm90", torch.stack(parts), target, -100, 200, "nan").logp
    torch.testing.assert_close(got, vs.linear_logp(hidden, weight, target, backend="sm90"), rtol=1e-6, atol=1e-6)


def test_targets_that_are_no_ids() -> None:
    for n in (9, 90):
        hidden, weight, _ = problem(n, 64, 1000)
        odd = torch.tensor([-1, 1000, 1005, 1 << 31, -100, 999, 0, 1 << 62, -(1 << 62)]).repeat(n // 9)
        got = vs.linear_logp(hidden, weight, odd, backend="sm90")
        assert isinstance(got, Tensor)
        valid = (odd == 999) | (odd == 0)
        assert torch.isfinite(got[valid]).all() and (got[odd == -100] == 0).all()
        assert torch.isnan(got[~valid & (odd != -100)]).all()
        assert (vs.linear_logp(hidden, weight, odd, backend="sm90", invalid="zero")[~valid] == 0).all()


def test_no_rows_no_columns_one_of_each() -> None:
    hidden, weight, target = problem(0, 64, 1000)
    assert everything(hidden, weight, target).logp.shape == (0,)
    hidden, weight, target = problem(5, 64, 0 + 16)
    records = local(hidden, weight[:0], target)[0]
    assert_same_bytes(records, expected(torch.zeros(5, 0), target)[0])
    one = everything(hidden[0], weight[:1], torch.tensor(0))
    assert one.logp.item() == 0 and one.entropy.item() == 0
    ignored = everything(hidden, weight, torch.full((5,), -100))
    assert (ignored.logp == 0).all() and torch.isfinite(ignored.lse).all()


def test_more_than_2_to_the_31() -> None:
    last = slice(-40, None)
    for n, d, v in ((66_000, 8, 32_768), (40, 2056, 1_048_592), (1_048_600, 2056, 16)):
        hidden, weight = torch.randn(n, d, dtype=torch.bfloat16), torch.randn(v, d, dtype=torch.bfloat16)
        target = torch.randint(0, v, (n,))
        target[-1] = v - 1
        whole = local(hidden, weight, target, entropy=False)[0]
        part = local(hidden[last], weight, target[last], entropy=False)[0]
        assert_same_bytes(whole[:, last].contiguous(), part, f"{n} x {d} x {v}")
        tail = weight[v - 16 :]
        alone = local(hidden[last], tail, target[last], start=v - 16, entropy=False)[0]
        want, _ = expected(chain(hidden[last], tail), target[last], start=v - 16, entropy=False)
        assert_same_bytes(alone, want, f"last columns of {n} x {d} x {v}")
        del hidden, weight, whole


def test_strides() -> None:
    hidden, weight, target = problem(65, 48, 1000)
    want = local(hidden, weight, target)[0]
    wide = torch.zeros(65, 99, dtype=torch.bfloat16)
    wide[:, 7:55] = hidden
    padded = torch.zeros(1000, 64, dtype=torch.bfloat16)
    padded[:, :48] = weight
    odd = torch.zeros(1000, 51, dtype=torch.bfloat16)
    odd[:, 2:50] = weight
    every = torch.zeros(2000, 48, dtype=torch.bfloat16)
    every[::2] = weight
    for h in (hidden, hidden.T.contiguous().T, wide[:, 7:55]):
        for w in (weight, padded[:, :48], odd[:, 2:50], weight.T.contiguous().T, every[::2]):
            assert_same_bytes(local(h, w, target)[0], want, f"{h.stride()} {w.stride()}")
    row = hidden[:1].expand(65, -1)
    got = everything(row, weight, target[:1].expand(65))
    assert (got.logp == got.logp[0]).all()
    spaced = torch.stack([target, target * 0], 1)[:, 0]
    same(everything(hidden, weight, spaced), everything(hidden, weight, target), "strided target_ids")
    bias = torch.randn(1000)
    two = torch.stack([bias, bias * 0], 1)[:, 0]
    same(everything(hidden, weight, target, two), everything(hidden, weight, target, bias), "strided bias")


@pytest.mark.parametrize("d", [1, 8, 100, 2047, 5120, 7168, 8192])
def test_depths(d: int) -> None:
    hidden, weight, target = problem(70, d, 200)
    want, _ = expected(chain(hidden, weight), target)
    assert_same_bytes(local(hidden, weight, target)[0], want)


def test_weight_changed_in_place_between_calls() -> None:
    hidden, weight, target = problem(20, 64, 1000)
    before = everything(hidden, weight, target)
    weight.copy_(problem(20, 64, 1000, seed=1)[1])
    after = everything(hidden, weight, target)
    assert (after.logp != before.logp).any()
    same(after, everything(hidden, weight.clone(), target), "a copy")


@pytest.mark.parametrize("t", [0.55, 0.6, 0.7, 0.85, 1.05, 1e-5])
def test_one_temperature_in_every_form(t: float) -> None:
    hidden, weight, target = problem(33, 64, 1000)
    want = everything(hidden, weight, target, temperature=t)
    for form in (torch.tensor(t), torch.full((33,), t)):
        same(everything(hidden, weight, target, temperature=form), want, str(form.shape))


def test_a_poisoned_row_stays_alone() -> None:
    for n in (40, 300):
        hidden, weight, target = problem(n, 64, 5003)
        clean = everything(hidden, weight, target)
        for value in (float("nan"), INF, -INF):
            for row in (0, n // 2, n - 1):
                spoilt = hidden.clone()
                spoilt[row, 3] = value
                out = everything(spoilt, weight, target)
                others = torch.arange(n) != row
                for name in ("logp", "lse", "entropy"):
                    assert torch.isnan(getattr(out, name)[row])
                    assert_same_bytes(getattr(out, name)[others], getattr(clean, name)[others], name)


def test_values_against_fp64() -> None:
    hidden, weight, target = problem(257, 2048, 20000, spread=1.0)
    z = hidden.double() @ weight.double().T
    logp = torch.log_softmax(z, -1)
    out = everything(hidden, weight, target)
    assert (out.logp - logp.gather(1, target[:, None])[:, 0]).abs().max() < 1.6e-5
    assert (out.lse - torch.logsumexp(z, -1)).abs().max() < 1.6e-5
    assert (out.entropy + (logp.exp() * logp).sum(-1)).abs().max() < 3e-5


def test_what_ran_is_named() -> None:
    hidden, weight, target = problem(4, 64, 100)
    auto = everything(hidden, weight, target, backend="auto", strict=True)
    assert auto.provenance.backend == "sm90" and auto.provenance.projection_id == "hopper-k16"
    assert auto.provenance.contract_bearing
    fp32 = everything(hidden.float(), weight.float(), target, strict=True)
    assert fp32.provenance.projection_id == "fma-chain"


def test_gradients_flow() -> None:
    hidden, weight, target = problem(70, 64, 500)
    hidden.requires_grad_(), weight.requires_grad_()
    up = torch.randn(70)
    vs.linear_logp(hidden, weight, target, backend="sm90").backward(up)
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    torch.log_softmax(h @ w.T, -1).gather(1, target[:, None])[:, 0].backward(up.double())
    for got, want in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        assert (got.double() - want).norm() <= 1e-2 * want.norm()
