"""The Triton kernels on a GPU at full sizes: every row, every launch configuration, every sharding the same bytes."""

from __future__ import annotations

import heapq
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import partials
from vocabshard.dist.fold import fold as fold_of
from vocabshard.kernels import cpu
from vocabshard.kernels.problem import LocalProblem, RowGrads, SavedRows
from vocabshard.testing import specification
from vocabshard.testing.compare import assert_same_bytes, differing
from vocabshard.testing.inputs import rows_from_bits, stacked_hard_rows

if importlib.util.find_spec("triton"):  # conftest.py says why, where there is none
    from vocabshard.dist import triton_fold
    from vocabshard.kernels import triton_linear, triton_logits
    from vocabshard.kernels.triton_config import CONFIGS, launch_config, logits_launch

pytestmark = [
    pytest.mark.needs("triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="full sizes are for a GPU"),
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")
RAGGED = (1, 15, 16, 17, 255, 257)


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, device="cuda", generator=g) * scale).to(dtype)


def inputs(n: int, d: int, v: int, dtype: torch.dtype = BF16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    target = torch.randint(-2, v + 3, (n,), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    target[0] = v - 1
    return normal(n, d, seed=seed, dtype=dtype), normal(v, d, seed=seed + 1, scale=2 / d**0.5, dtype=dtype), target


def each(check: Callable[..., None], *arguments: Iterable) -> None:
    """check over the arguments in threads: most of the time goes into compilations, which then run side by side."""
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(check, *arguments))


def plain(v: int, entropy: bool = False, start: int = 0, softcap: float | None = None) -> LocalProblem:
    return LocalProblem(start, v, softcap, entropy)


def run(hidden, weight, target, problem=None, bias=None, scale=None, **options) -> Tensor:
    problem = plain(len(weight)) if problem is None else problem
    return triton_linear.forward(hidden, weight, bias, target, scale, problem, **options)[0]


def logits_of(hidden, weight, problem=None, bias=None, **options) -> Tensor:
    problem = plain(len(weight)) if problem is None else problem
    target = torch.zeros(len(hidden), dtype=torch.int64, device="cuda")
    return triton_linear.forward(hidden, weight, bias, target, None, problem, want_logits=True, **options)[1]


def expected(y: Tensor, target: Tensor, entropy: bool = False) -> Tensor:
    """The specification's records of y [N, V] after temperature; target_ids of local columns."""
    local = torch.where((target >= 0) & (target < y.shape[1]), target, -1)
    return specification.partials(y, local, entropy)


def from_library(hidden: Tensor, weight: Tensor) -> Tensor:
    """The library's product with fp32 output: the same chain at these sizes (N >= 255, D <= 2048, aligned)."""
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


@pytest.mark.parametrize("v", [50257, 128256, 129920, 151936, 8, 1])
def test_ragged_sizes(v: int) -> None:
    hidden, weight, target = inputs(257, 2048, v)
    z = logits_of(hidden, weight)
    if v % 8 == 0 and v > 8:
        assert_same_bytes(z.contiguous(), from_library(hidden, weight), "logits")
    want = expected(z, target, True)
    for n in RAGGED:
        for problem in (plain(v), plain(v, entropy=True)):
            got = run(hidden[:n], weight, target[:n], problem)
            assert_same_bytes(got, want[: len(got), :n], f"N {n}, entropy {problem.entropy}")
    if v > 1000:
        chunks = torch.stack([torch.logsumexp(c, 1) for c in z.split(v // 4 + 1, 1)])
        assert differing(torch.logsumexp(chunks, 0), torch.logsumexp(z, 1)) > 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_hidden_size_is_the_chain_of_its_zero_padding(seed: int) -> None:
    """Sizes that the copy engine can't address are read through pointers."""

    def check(d: int, dtype: torch.dtype) -> None:
        hidden, weight, target = inputs(257, d, 1000, dtype, seed)
        padded = [torch.nn.functional.pad(x, (0, -d % 128)) for x in (hidden, weight)]
        z = logits_of(hidden, weight)
        assert_same_bytes(z, logits_of(*padded), f"D {d}, logits")
        want = expected(z, target, True)
        for n in RAGGED:
            got = run(hidden[:n], weight, target[:n], plain(1000, entropy=True))
            assert_same_bytes(got, want[:, :n], f"D {d}, N {n}")

    each(check, (1, 8, 17, 100, 2048, 8, 100), [BF16] * 5 + [F16] * 2)


def test_every_batch_size_and_position() -> None:
    """N = 1 ... 1024 from the front, at the back and alone: a row's bytes are its own."""
    hidden, weight, target = inputs(1024, 128, 4112)
    want = expected(logits_of(hidden, weight), target)
    whole = run(hidden, weight, target)
    assert_same_bytes(whole, want)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for n in range(1, 1025):
        wrong += (run(hidden[:n], weight, target[:n]) != want[:, :n]).sum()
        wrong += (run(hidden[-n:], weight, target[-n:]) != want[:, -n:]).sum()
        wrong += (run(hidden[n - 1 : n], weight, target[n - 1 : n]) != want[:, n - 1 : n]).sum()
        half = slice(512 - n // 2, 512 - n // 2 + n)
        wrong += (run(hidden[half], weight, target[half]) != want[:, half]).sum()
    assert int(wrong) == 0
    order = torch.randperm(1024, device="cuda")
    assert_same_bytes(run(hidden[order], weight, target[order]), want[:, order], "permuted")


def splits(size: int, ways: int, even: bool) -> list[int]:
    if even:
        return [size * i // ways for i in range(ways + 1)]
    return [0, *sorted(size * (i * i + i) // (ways * ways + ways) // 16 * 16 for i in range(1, ways)), size]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("real, padded", [(151936, 151936), (151936, 152576), (50257, 50304), (129920, 131072)])
def test_shards_fold_to_the_same_bytes(real: int, padded: int, entropy: bool) -> None:
    """W = 1, 2, 3, 4, 8 in one process: even and uneven, padded as Megatron (multiples of 128 W) and vLLM (64) do."""
    n = 70
    hidden, weight, _ = inputs(n, 256, padded)
    weight[real:] = NAN
    target = torch.randint(0, real, (n,), device="cuda")
    target[:3] = torch.tensor([real - 1, real, -100], device="cuda")
    out = vs.linear_logp(
        hidden,
        weight[:real],
        target,
        return_lse=True,
        return_entropy=True,
        backend="triton",
        strict=True,
        validate=False,
    )
    assert out.provenance.contract_bearing and torch.isnan(out.logp[1]) and out.logp[2] == 0
    for ways, even in itertools.product((1, 2, 3, 4, 8), (True, False)):
        bounds = splits(padded, ways, even)
        if any(b % 16 for b in bounds):
            continue
        stacked = []
        for a, b in itertools.pairwise(bounds):
            valid = max(0, min(b, real) - a)
            stacked.append(run(hidden, weight[a:b], target, LocalProblem(a, valid, None, entropy)))
        got = triton_fold.fold(torch.stack(stacked), target, -100, real, "nan")
        assert_same_bytes(got.logp, out.logp, f"logp over {bounds}")
        assert_same_bytes(got.lse, out.lse, f"lse over {bounds}")
        assert_same_bytes(got.entropy, out.entropy if entropy else None, f"entropy over {bounds}")


EPILOGUES = {
    "plain": {},
    "entropy": {"entropy": True},
    "everything": {"entropy": True, "bias": F32, "softcap": 20.0, "rows": True},
}


@pytest.mark.parametrize(
    "dtype, epilogue", [(BF16, "plain"), (BF16, "entropy"), (BF16, "everything"), (F16, "plain"), (F16, "everything")]
)
def test_every_configuration_gives_the_same_bytes(dtype: torch.dtype, epilogue: str) -> None:
    options = EPILOGUES[epilogue]
    n, v, valid = 300, 5080, 5071
    hidden, weight, target = inputs(n, 192, v, dtype)
    weight[valid:] = NAN
    bias = normal(v, seed=5, dtype=options["bias"]) if "bias" in options else None
    scale = normal(n, seed=6, dtype=F32).abs() + 0.5 if "rows" in options else None
    problem = LocalProblem(0, valid, options.get("softcap"), options.get("entropy", False))
    with_logits = (dtype, epilogue) == (BF16, "plain") or epilogue == "everything"
    z = logits_of(hidden, weight, plain(valid, softcap=problem.softcap), bias)
    assert (z[:, valid:] == -INF).all()
    if epilogue != "everything":
        assert_same_bytes(z[:, :5056], from_library(hidden, weight[:5056]), "logits")
    y = z[:, :valid] if scale is None else z[:, :valid] * scale[:, None]
    want = expected(y, target, problem.entropy)

    def check(name: str) -> None:
        for runs in (1, 3, 17):
            launch = replace(CONFIGS[name], runs=runs, group_rows=2 if runs == 3 else 32)
            got = run(hidden, weight, target, problem, bias, scale, launch=launch)
            assert_same_bytes(got, want, f"{name}, {runs} runs")
        if with_logits:
            got, logits = triton_linear.forward(
                hidden, weight, bias, target, scale, problem, want_logits=True, launch=launch
            )
            assert_same_bytes(got, want, f"{name}, with logits")
            assert_same_bytes(logits, z, f"{name}, logits")

    each(check, [name for name, config in CONFIGS.items() if config.block_k > 1])
    for n in (1, 16, 17, 128, 129):
        scales = None if scale is None else scale[:n]
        assert_same_bytes(run(hidden[:n], weight, target[:n], problem, bias, scales), want[:, :n], f"N {n}")


def test_temperatures() -> None:
    hidden, weight, target = inputs(40, 256, 3000)
    target = target.clamp(0, 2999)
    for t in (0.6, 0.7, 1.05):
        reciprocal = float(torch.tensor(1 / float(torch.tensor(t))))
        want = expected(logits_of(hidden, weight) * torch.tensor(reciprocal, device="cuda"), target)
        assert_same_bytes(run(hidden, weight, target, scale=reciprocal), want, f"T {t}")
        rows = torch.full((40,), reciprocal, device="cuda")
        assert_same_bytes(run(hidden, weight, target, scale=rows), want, f"T {t}, by row")
        given = [t, torch.tensor(t, device="cuda"), torch.full((40,), t, device="cuda")]
        logps = [vs.linear_logp(hidden, weight, target, temperature=x, backend="triton") for x in given]
        assert_same_bytes(logps[1], logps[0], "a tensor")
        assert_same_bytes(logps[2], logps[0], "a tensor of rows")
    scale = torch.ones(40, device="cuda")
    scale[7] = NAN
    got, want = run(hidden, weight, target, scale=scale), run(hidden, weight, target)
    others = torch.arange(40, device="cuda") != 7
    assert_same_bytes(got[:, others], want[:, others])
    assert torch.isnan(partials.maxima(got)[7])


def test_biases() -> None:
    hidden, weight, target = inputs(40, 256, 3000)
    none = run(hidden, weight, target, plain(3000, entropy=True))
    for dtype in (BF16, F16, F32):
        zeros = torch.zeros(3000, dtype=dtype, device="cuda")
        assert_same_bytes(run(hidden, weight, target, plain(3000, entropy=True), bias=zeros), none, str(dtype))
        bias = normal(3000, dtype=dtype)
        bias[::3] = -INF
        y = logits_of(hidden, weight) + bias.float()
        want = expected(y, target, True)
        assert_same_bytes(run(hidden, weight, target, plain(3000, entropy=True), bias=bias), want, f"-inf, {dtype}")
    strided = normal(6000)[::2]
    assert_same_bytes(run(hidden, weight, target, bias=strided), run(hidden, weight, target, bias=strided.contiguous()))
    folded = triton_fold.fold(want[None], target.clamp(0, 2999), -100, 3000, "nan")
    assert torch.isfinite(folded.entropy).all()


@pytest.mark.parametrize("entropy", [False, True])
def test_hard_rows(entropy: bool) -> None:
    """As a bias, so that the kernel sees these very logits; then folded, alone and in company."""
    columns = 200
    names, rows = stacked_hard_rows(columns)
    rows = rows.cuda()
    hidden, weight = torch.zeros(1, 8, dtype=BF16, device="cuda"), torch.zeros(columns, 8, dtype=BF16, device="cuda")
    target = torch.tensor([5], device="cuda")
    launches = [None] + [replace(CONFIGS[name], runs=1) for name in ("large", "decode", "pointers")]
    wants = [expected(row[None] + 0.0, target, entropy) for row in rows]

    def check(launch: object) -> None:
        for name, row, want in zip(names, rows, wants, strict=True):
            got = run(hidden, weight, target, plain(columns, entropy), bias=row.contiguous(), launch=launch)
            assert_same_bytes(got, want, name)

    each(check, launches)
    one = torch.cat(wants, 1)[None]
    targets = torch.full((len(names),), 5, device="cuda")
    targets[1], targets[2], targets[3] = -100, -7, 10**6
    for gathered in (
        one,
        torch.cat([one, one.roll(1, 2), one.roll(7, 2)]),
        torch.cat([one.roll(i, 2) for i in range(8)]),
    ):
        for invalid in ("nan", "zero"):
            got = triton_fold.fold(gathered, targets, -100, 3 * columns, invalid)
            want = fold_of("cpu", gathered.cpu(), targets.cpu(), -100, 3 * columns, invalid)
            for field, a, b in zip(got._fields, got, want, strict=True):
                assert_same_bytes(a if a is None else a.cpu(), b, f"{field} of {len(gathered)}, {invalid}")


def test_poison_stays_in_its_row() -> None:
    hidden, weight, target = inputs(300, 256, 2000)
    want = run(hidden, weight, target, plain(2000, entropy=True))
    for value in (NAN, INF, -INF):
        spoiled = hidden.clone()
        spoiled[17, 100] = value
        got = run(spoiled, weight, target, plain(2000, entropy=True))
        others = torch.arange(300, device="cuda") != 17
        assert_same_bytes(got[:, others], want[:, others], f"{value}")
        assert (got[1:, 17] == 0).all() and not (partials.maxima(got)[17] <= 2.0**20)


def test_softcap_for_every_mantissa() -> None:
    """All 2^23 mantissas of the exponents where tanh bends, and of what is nearly zero."""
    size = 1 << 23
    weight = torch.zeros(size, 8, dtype=BF16, device="cuda")
    low = torch.arange(size, dtype=torch.int32, device="cuda")
    for cap in (30.0, 1.7):
        for exponent in (*range(-3 + 127, 11 + 127), 0, 1, 2, 5, 33, 38):
            z = ((exponent << 23) | low).view(F32)
            z = torch.where(low % 2 == 0, z, -z)
            got = logits_of(weight[:1], weight, plain(size, softcap=cap), bias=z)
            assert_same_bytes(got[0], specification.softcap(z + 0.0, cap), f"cap {cap}, exponent {exponent - 127}")
    odd = torch.cat(
        [rows_from_bits(b, 16) for b in (0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF)]
    ).cuda()
    for cap in (30.0, 1e-30, 1e30):
        got = logits_of(weight[:1], weight[:80], plain(80, softcap=cap), bias=odd)
        want = specification.softcap(odd, cap)[None]
        assert torch.equal(got.isnan(), want.isnan())
        assert_same_bytes(got[:, 32:], want[:, 32:], f"cap {cap}")


def test_graph_streams_and_device() -> None:
    hidden, weight, target = inputs(300, 512, 3000)
    problem = plain(3000, entropy=True)
    other = inputs(300, 512, 3000, seed=9)
    want = [run(*x, problem) for x in ((hidden, weight, target), other)]
    static = [x.clone() for x in (hidden, weight, target)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        records = run(*static, problem)
        folded = triton_fold.fold(records[None], static[2], -100, 3000, "nan")
    for values, expect in zip(((hidden, weight, target), other), want, strict=True):
        for to, value in zip(static, values, strict=True):
            to.copy_(value)
        graph.replay()
        assert_same_bytes(records, expect, "replayed")
        eager = triton_fold.fold(expect[None], values[2], -100, 3000, "nan")
        for a, b in zip(folded, eager, strict=True):
            assert_same_bytes(a, b, "replayed fold")
    side = torch.cuda.Stream()
    late = hidden.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(other[0])  # only in the order of this stream is this seen
        got = run(late, other[1], other[2], problem)
    side.synchronize()
    assert_same_bytes(got, want[1], "on a second stream")
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    moved = [x.to(last) for x in (hidden, weight, target)]
    with torch.cuda.device(0):
        got = run(*moved, problem)
        assert got.device == last
    assert_same_bytes(got.cpu(), want[0].cpu(), f"on {last}")


def test_nothing_is_synchronised() -> None:
    hidden, weight, target = inputs(300, 512, 3000)
    run(hidden, weight, target)
    torch.cuda.set_sync_debug_mode("error")
    try:
        records = run(hidden, weight, target)
        triton_fold.fold(records[None], target, -100, 3000, "nan")
        vs.linear_logp(hidden, weight, target, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sizes_beyond_32_bits() -> None:
    problem = plain(151936)
    hidden, weight, target = inputs(16384, 64, 151936)
    target[-40:] = torch.arange(151936 - 40, 151936, device="cuda")
    records, logits = triton_linear.forward(hidden, weight, None, target, None, problem, want_logits=True)
    for rows in (slice(0, 40), slice(-40, None)):
        assert_same_bytes(records[:, rows], run(hidden[rows], weight, target[rows]), "N * V")
        assert_same_bytes(logits[rows], logits_of(hidden[rows], weight), "N * V, logits")
    assert_same_bytes(run(hidden, weight, target), records, "N * V, without logits")
    del hidden, weight, records, logits
    d = 16384
    weight = torch.empty(151936, d, dtype=BF16, device="cuda").normal_(std=d**-0.5)
    hidden = normal(20, d)
    target = torch.arange(151936 - 20, 151936, device="cuda")
    z = logits_of(hidden, weight)
    assert_same_bytes(z[:, -1024:].contiguous(), logits_of(hidden, weight[-1024:]), "V * D")
    assert_same_bytes(run(hidden, weight, target), expected(z, target), "V * D, records")
    wide = torch.as_strided(weight, (151936, 8190), (d, 2))  # through pointers, up to the last element
    z = logits_of(hidden[:, :8190], wide)
    assert_same_bytes(z[:, -64:].contiguous(), logits_of(hidden[:, :8190], wide[-64:].contiguous()), "V * D, pointers")
    # the same memory as hidden: 151936 rows
    target = torch.arange(151936, device="cuda") % 16
    records = run(weight, hidden[:16], target)
    assert_same_bytes(records[:, -30:], run(weight[-30:].clone(), hidden[:16], target[-30:]), "N * D")


def test_layouts_change_no_byte() -> None:
    hidden, weight, target = inputs(300, 256, 2000)
    want = run(hidden, weight, target)
    wide = torch.full((300, 263), NAN, dtype=BF16, device="cuda")
    wide[:, 3:259] = hidden
    tall = torch.full((4000, 256), NAN, dtype=BF16, device="cuda")
    tall[::2] = weight
    variants = {
        "hidden transposed": (hidden.t().contiguous().t(), weight),
        "hidden sliced, unaligned": (wide[:, 3:259], weight),
        "weight transposed": (hidden, weight.t().contiguous().t()),
        "every other row of weight": (hidden, tall[::2]),
    }

    def check(name: str) -> None:
        h, w = variants[name]
        for n in (1, 17, 300):
            assert_same_bytes(run(h[:n], w, target[:n]), want[:, :n], f"{name}, N {n}")

    each(check, variants)
    one = hidden[3:4].expand(300, 256)
    assert_same_bytes(run(one, weight, target), run(one.contiguous(), weight, target), "hidden expanded")


def test_a_weight_changed_in_place_is_seen() -> None:
    hidden, weight, target = inputs(300, 256, 2008)
    before = run(hidden, weight, target)
    weight.copy_(inputs(300, 256, 2008, seed=4)[1])
    after = run(hidden, weight, target)
    assert differing(before, after) > 0
    assert_same_bytes(after, run(hidden, weight.clone(), target))


def test_fp32_equals_the_cpu() -> None:
    for n, d, v in ((17, 100, 1000), (70, 33, 777), (1, 1, 8)):
        hidden, weight, target = inputs(n, d, v, F32)
        options = {"return_lse": True, "return_entropy": True, "return_logits": True, "validate": False}
        options |= {"softcap": 5.0, "temperature": 0.7}
        got = vs.linear_logp(hidden, weight, target, backend="triton", strict=True, **options)
        want = vs.linear_logp(hidden.cpu(), weight.cpu(), target.cpu(), backend="cpu", **options)
        for field in ("logp", "lse", "entropy", "logits"):
            assert_same_bytes(getattr(got, field).cpu().contiguous(), getattr(want, field), f"{field} at {n} {d} {v}")


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_logits_that_exist(dtype: torch.dtype) -> None:
    """Every launch, alignment, batch and chunk the bytes of the specification; gradients those of the CPU."""
    for v, seed in ((151936, 0), (50257, 1), (129, 2)):
        logits = normal(300, v, seed=seed, scale=4, dtype=dtype)
        logits[::7, 5], logits[1::7, : v // 2], logits[2] = 40.0, -INF, -INF
        logits[3, v - 1], logits[4, 0] = NAN, INF
        target = torch.arange(300, device="cuda") * 7919 % v
        problem = plain(v, entropy=True)
        want = expected(logits.float(), target, True)
        for n in (*range(1, 10), 15, 16, 17, 31, 33, 127, 129, 255, 257, 300):
            got = triton_logits.logits_forward(logits[:n], target[:n], None, problem)
            assert_same_bytes(got, want[:, :n], f"{v}, N {n}")
            got = triton_logits.logits_forward(logits[-n:], target[-n:], None, plain(v))
            assert_same_bytes(got, want[:4, -n:], f"{v}, the last {n}")
        around = torch.full((300, v + 5), NAN, dtype=dtype, device="cuda")
        around[:, 3 : v + 3] = logits
        got = triton_logits.logits_forward(around[:, 3 : v + 3], target, None, problem)
        assert_same_bytes(got, want, f"{v}, unaligned")
        order = torch.randperm(300, device="cuda")
        got = triton_logits.logits_forward(logits, target[order], None, problem, order)
        assert_same_bytes(got, want[:, order], f"{v}, rows")
        bounds = [0, v // 3 // 16 * 16, v // 2 // 16 * 16, v]
        pieces = [
            triton_logits.logits_forward(logits[:, a:b], target, None, plain(b - a, True, start=a))
            for a, b in itertools.pairwise(bounds)
        ]
        folded = triton_fold.fold(torch.stack(pieces), target, -100, v, "nan")
        alone = triton_fold.fold(want[None], target, -100, v, "nan")
        for field, a, b in zip(folded._fields, folded, alone, strict=True):
            assert_same_bytes(a, b, f"{v}, {field} of shards")
    for launch in ((4, 2, 1), (4, 2, 3), (2, 1, 9), (1, 1, 2), logits_launch(1, 151936, 132)):
        logits, target = normal(5, 50257, seed=9, scale=4, dtype=dtype), torch.arange(5, device="cuda") * 12000
        want = expected(logits.float(), target)
        got = triton_logits.logits_forward(logits, target, None, plain(50257), launch=launch)
        assert_same_bytes(got, want, f"{launch}")


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_gradients_of_logits_equal_the_cpu(dtype: torch.dtype) -> None:
    logits, target = normal(40, 5003, scale=4, dtype=dtype), torch.arange(40, device="cuda") * 125
    logits[1, ::2], logits[2], logits[3, 7] = -INF, -INF, NAN
    scale = normal(40, seed=4, dtype=F32).abs() + 0.5
    for entropy in (False, True):
        problem = LocalProblem(0, 5001, None, entropy)
        gs = [normal(40, seed=i, dtype=F32) for i in (1, 2, 3)]
        for g in gs:
            g[9] = 0
        grads = RowGrads(gs[0], gs[1], gs[2] if entropy else None)
        for rows in (None, torch.arange(39, -1, -1, device="cuda") // 2):
            records = triton_logits.logits_forward(logits, target, scale, problem, rows)
            folded = triton_fold.fold(records[None], target, -100, 5001, "nan")
            saved = SavedRows(folded.lse2_int, folded.lse2_frac, folded.entropy)
            got = torch.full_like(logits, 7.0)
            triton_logits.logits_backward(logits, target, scale, problem, saved, grads, got, rows)
            want = torch.full_like(logits.cpu(), 7.0)
            on_cpu = [type(x)(*(None if y is None else y.cpu() for y in x)) for x in (saved, grads)]
            index = None if rows is None else rows.cpu()
            cpu.logits_backward(logits.cpu(), target.cpu(), scale.cpu(), problem, *on_cpu, want, index)
            assert torch.equal(got.isnan().cpu(), want.isnan())
            assert_same_bytes(
                got.cpu().nan_to_num(5.0), want.nan_to_num(5.0), f"entropy {entropy}, rows {rows is not None}"
            )
            assert (got[:, 5001:] == 0).all()


def test_offsets_of_logits_beyond_32_bits() -> None:
    logits = torch.empty(16000, 151936, dtype=BF16, device="cuda").normal_()
    target = torch.arange(16000, device="cuda") * 9
    records = triton_logits.logits_forward(logits, target, None, plain(151936))
    for rows in (slice(0, 9), slice(-9, None)):
        got = triton_logits.logits_forward(logits[rows].clone(), target[rows], None, plain(151936))
        assert_same_bytes(got, records[:, rows])
    folded = triton_fold.fold(records[None], target, -100, 151936, "nan")
    g = normal(16000, dtype=F32)
    arguments = (target, None, plain(151936), SavedRows(folded.lse2_int, folded.lse2_frac, None), RowGrads(g, -g, None))
    last = logits[-9:].clone()
    triton_logits.logits_backward(logits, *arguments, logits)
    few = (target[-9:], None, plain(151936), SavedRows(folded.lse2_int[-9:], folded.lse2_frac[-9:], None))
    triton_logits.logits_backward(last, *few, RowGrads(g[-9:], -g[-9:], None), last)
    assert_same_bytes(logits[-9:], last)


def test_configurations_fill_the_chip() -> None:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    for n, d, v in ((4096, 4096, 151936), (4096, 2048, 131072), (4096, 4096, 37984), (64, 4096, 151936)):
        config = launch_config(n, v, d, "descriptors", False, count)
        rows, blocks, long_runs = -(-n // config.block_m), -(-v // config.block_n), config.runs - config.short_runs
        long_blocks = blocks - config.short_blocks
        runs = [(i + 1) * long_blocks // long_runs - i * long_blocks // long_runs for i in range(long_runs)]
        runs += [1] * config.short_runs
        slots = [0] * count * config.residents  # each takes the next program when its last has ended
        for blocks_of_run in (b for b in runs for _ in range(rows)):
            heapq.heapreplace(slots, slots[0] + blocks_of_run)
        assert max(slots) <= 1.04 * rows * blocks / len(slots), (n, d, v, config)
