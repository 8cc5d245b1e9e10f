"""Logits that exist, on an H100 or H200: the same bytes as the CPU and the specification whatever surrounds a row."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.kernels import cpu, module
from vocabshard.kernels.problem import LocalProblem, RowGrads, SavedRows
from vocabshard.partials import FoldedRows
from vocabshard.testing import specification
from vocabshard.testing.compare import assert_same_bytes, differing
from vocabshard.testing.inputs import stacked_hard_rows

pytestmark = pytest.mark.needs("sm90")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
V = 50257
NAN, INF = float("nan"), float("inf")


def gpu():
    return module("sm90")


def inputs(n: int, v: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 4.0):
    """Logits and targets on the CPU; some targets ignored, some invalid."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, v, generator=g) * scale).to(dtype)
    target = torch.randint(0, v, (n,), generator=g)
    target[3::11] = -100
    target[5::13] = v + 2
    return logits, target


def score(logits: Tensor, target: Tensor, **options) -> vs.LogpOutput:
    return vs.batch_invariant_logp(logits, target, return_lse=True, return_max=True, validate=False, **options)


def assert_same_output(actual: vs.LogpOutput, expected: vs.LogpOutput, what: str, pick: slice | Tensor = slice(None)):
    for name in ("logp", "lse", "entropy", "maximum"):
        a, b = getattr(actual, name), getattr(expected, name)
        assert_same_bytes(None if a is None else a.cpu(), None if b is None else b[pick].cpu(), f"{what}: {name}")


def fold(records: Tensor, target: Tensor, v: int) -> FoldedRows:
    return specification.fold(records[None], target, -100, v, "nan")


# ---- the same bytes as everything else ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.6, "rows"])
def test_equals_the_cpu(dtype: torch.dtype, entropy: bool, temperature: float | str | None) -> None:
    for n, v in ((1, 1), (1, 8), (2, 15), (15, 16), (16, 17), (17, 513), (255, 4099), (257, 1000), (1, V), (3, 151936)):
        logits, target = inputs(n, v, dtype, seed=n)
        t = torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.5 if temperature == "rows" else temperature
        options = {"return_entropy": entropy}
        want = score(logits, target, temperature=t, **options)
        t = t.cuda() if isinstance(t, Tensor) else t
        got = score(logits.cuda(), target.cuda(), temperature=t, **options)
        assert got.provenance.backend == "sm90"
        assert_same_output(got, want, f"{n} x {v}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 96, 129, 1024])
def test_hard_rows_equal_the_specification(dtype: torch.dtype, columns: int) -> None:
    names, logits = stacked_hard_rows(columns)
    logits = logits.to(dtype)
    for place in (0, 7, columns - 1):
        target = torch.full((len(names),), place)
        for entropy in (False, True):
            records = specification.partials(logits.float(), target, entropy)
            got = (
                gpu()
                .logits_forward(logits.cuda(), target.cuda(), None, LocalProblem(0, columns, None, entropy), None)
                .cpu()
            )
            assert_same_bytes(got, records, f"records, entropy {entropy}, target {place}")
            want = fold(records, target, columns)
            rows = gpu().logits_rows(
                logits.cuda(), target.cuda(), None, LocalProblem(0, columns, None, entropy), None, -100, columns, "nan"
            )
            for name, a, b in zip(want._fields, rows, want, strict=True):
                if entropy or name != "entropy":
                    assert_same_bytes(a.cpu(), b, f"{name}, entropy {entropy}, target {place}")


@functools.lru_cache(maxsize=1)
def many_kinds(v: int, dtype: torch.dtype) -> Tensor:
    """Rows of every kind, enough of them for the kernel that serves large problems."""
    g = torch.Generator().manual_seed(7)
    n = (1 << 24) // v + 40
    x = torch.randn(n, v, generator=g) * 2
    x[1::8] *= 20
    x[2::8] -= 60
    x[3::8] += 45
    x[4::8, ::3] = -INF
    x[5::8] -= 300 * (torch.rand(x[5::8].shape, generator=g) < 0.5)
    x[6::8] = x[6::8].sort(1).values
    x[7::16] = torch.linspace(-400, 300, x[7::16].shape[0])[:, None] + x[7::16]
    names, hard = stacked_hard_rows(64)
    x = x.to(dtype)
    rows = torch.arange(len(names)) * 5 % n
    x[rows, -64:] = hard.to(dtype)
    x[rows, :-64] = -INF
    return x


@pytest.mark.parametrize("temperature", [None, 0.6, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v", [98320, 32768, 50257, 4104, 520])
def test_large_problems_equal_the_cpu(dtype: torch.dtype, v: int, temperature: float | None) -> None:
    logits = many_kinds(v, dtype)
    target = torch.randint(0, v, (len(logits),), generator=torch.Generator().manual_seed(1))
    want = score(logits, target, temperature=temperature)
    got = score(logits.cuda(), target.cuda(), temperature=temperature)
    assert_same_output(got, want, f"v {v}")


def test_equals_linear_logp_of_the_same_logits() -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(33, 64, generator=g).bfloat16().cuda(), torch.randn(4099, 64, generator=g).bfloat16()
    target = torch.randint(0, 4099, (33,), generator=g).cuda()
    out = vs.linear_logp(hidden, weight.cuda(), target, return_logits=True, return_entropy=True, return_lse=True)
    got = vs.batch_invariant_logp(out.logits, target, return_entropy=True, return_lse=True)
    for name in ("logp", "lse", "entropy"):
        assert_same_bytes(getattr(got, name), getattr(out, name), name)


def test_triton_gives_the_same_bytes() -> None:
    logits, target = inputs(257, 4099)
    x, t = logits.cuda(), target.cuda()
    theirs = score(x, t, backend="triton", return_entropy=True)
    assert_same_output(score(x, t, return_entropy=True), theirs, "triton")
    g = torch.randn(257, generator=torch.Generator().manual_seed(1)).cuda()
    assert_same_bytes(gradients(x, t, g), gradients(x, t, g, backend="triton"), "gradient")


# ---- whatever surrounds a row ----


def sizes() -> list[int]:
    powers = [2**k + d for k in range(4, 12) for d in (-1, 0, 1)]
    return [*range(1, 10), *(n for n in powers if n > 9)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("v", [50257, 32768])
def test_any_batch_around_a_row(seed: int, v: int) -> None:
    g = torch.Generator("cuda").manual_seed(seed)
    x = (torch.randn(2049, v, generator=g, device="cuda") * 4).bfloat16()
    t = torch.randint(-1, v + 1, (2049,), generator=g, device="cuda")
    whole = score(x, t)
    gradient = torch.randn(2049, generator=torch.Generator().manual_seed(seed)).cuda()
    grad = gradients(x, t, gradient)
    # an ordinary sum depends on its order here
    assert differing(x.float().exp().sum(1), x.float().exp().flip(1).sum(1))
    for n in sizes():
        for begin in {0, (2049 - n) // 2, 2049 - n}:
            rows = slice(begin, begin + n)
            assert_same_output(score(x[rows], t[rows]), whole, f"rows {begin} to {begin + n}", rows)
            if n < 600:
                part = gradients(x[rows], t[rows], gradient[rows])
                assert_same_bytes(part, grad[rows], f"gradient of rows {begin} to {begin + n}")


def gradients(x: Tensor, target: Tensor, upstream: Tensor, **options) -> Tensor:
    leaf = x.detach().requires_grad_()
    vs.batch_invariant_logp(leaf, target, validate=False, **options).backward(upstream)
    return leaf.grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_permutations_compaction(dtype: torch.dtype) -> None:
    logits, target = inputs(131, V, dtype, seed=4)
    x, t = logits.cuda(), target.cuda()
    upstream = torch.randn(131, generator=torch.Generator().manual_seed(4)).cuda()
    whole, grad = score(x, t), gradients(x, t, upstream)
    for step in (1, 7):
        for begin in range(0, 131, step):
            rows = slice(begin, begin + step)
            assert_same_output(score(x[rows], t[rows]), whole, f"chunk of {step} at {begin}", rows)
            assert_same_bytes(gradients(x[rows], t[rows], upstream[rows]), grad[rows], f"gradient, chunk at {begin}")
    order = torch.randperm(131, generator=torch.Generator().manual_seed(5)).cuda()
    assert_same_output(score(x[order], t[order]), whole, "permuted", order)
    assert_same_bytes(gradients(x[order], t[order], upstream[order]), grad[order], "gradient, permuted")
    assert_same_output(score(x, t[order], rows=order), whole, "rows=", order)
    chosen = order[:50]
    assert_same_output(score(x, t[chosen], rows=chosen), whole, "compacted", chosen)
    some = gradients(x, t[chosen], upstream[chosen], rows=chosen)
    assert_same_bytes(some[chosen], grad[chosen], "gradient, compacted")
    left_out = torch.ones(131, dtype=torch.bool, device="cuda")
    left_out[chosen] = False
    assert (some[left_out] == 0).all()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("entropy", [False, True])
def test_any_sharding(shards: int, entropy: bool) -> None:
    logits, target = inputs(65, 50257, seed=6)
    x, t = logits.cuda(), target.cuda()
    whole = gpu().logits_rows(x, t, None, LocalProblem(0, V, None, entropy), None, -100, V, "nan")
    tiles = -(-V // 16)
    edges = [min(V, 16 * (tiles * i // shards)) for i in range(shards + 1)]
    records = torch.stack(
        [
            gpu().logits_forward(x[:, a:b], t, None, LocalProblem(a, b - a, None, entropy), None)
            for a, b in itertools.pairwise(edges)
        ]
    )
    for name, a, b in zip(whole._fields, fold_on_gpu(records, t), whole, strict=True):
        assert_same_bytes(a, b, f"{shards} shards: {name}")
    upstream = RowGrads(torch.randn(65).cuda(), torch.randn(65).cuda(), torch.randn(65).cuda() if entropy else None)
    saved = SavedRows(whole.lse2_int, whole.lse2_frac, whole.entropy)
    full, parts = torch.empty_like(x), torch.empty_like(x)
    gpu().logits_backward(x, t, None, LocalProblem(0, V, None, entropy), saved, upstream, full)
    for a, b in itertools.pairwise(edges):
        problem = LocalProblem(a, b - a, None, entropy)
        gpu().logits_backward(x[:, a:b], t, None, problem, saved, upstream, parts[:, a:b])
    assert_same_bytes(parts, full, f"{shards} shards: gradient")


def fold_on_gpu(records: Tensor, target: Tensor) -> FoldedRows:
    from vocabshard.dist.fold import fold as fold_records

    return fold_records("sm90", records, target, -100, V, "nan")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v", [4099, 4096, 50257])
def test_strides_and_alignment(dtype: torch.dtype, v: int) -> None:
    n = 37 if v < 50000 else 400
    logits, target = inputs(n, v, dtype, seed=8)
    want = score(logits[:37], target[:37], return_entropy=True)
    t = target.cuda()
    upstream = torch.randn(n, generator=torch.Generator().manual_seed(8)).cuda()
    grad = gradients(logits.cuda(), t, upstream)
    for before, after in ((0, 0), (1, 0), (0, 3), (3, 8), (8, 8), (5, 11)):
        wide = torch.full((n, before + v + after), NAN, dtype=dtype, device="cuda")
        view = wide[:, before : before + v]
        view.copy_(logits)
        assert_same_output(score(view[:37], t[:37], return_entropy=True), want, f"{before} before, {after} after")
        assert_same_output(score(view, t), score(logits.cuda(), t), f"{before} before, {after} after, all rows")
        assert_same_bytes(gradients(view, t, upstream), grad, f"gradient, {before} before, {after} after")


def test_real_vocabulary_smaller_than_the_logits() -> None:
    logits, target = inputs(9, 520)
    x = logits.cuda()
    x[:, 500:] = NAN
    target = target.clamp(max=499)
    want = score(logits[:, :500], target)
    out = vs.vocab_parallel_logp(x.requires_grad_(), target.cuda(), real_vocab_size=500)
    assert_same_bytes(out.logp.cpu(), want.logp)
    out.logp.sum().backward()
    assert (x.grad[:, 500:] == 0).all() and not x.grad.isnan().any()


# ---- gradients ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [None, 0.6])
def test_gradients_against_fp64(dtype: torch.dtype, temperature: float | None) -> None:
    n, v = 65, 4099
    logits, target = inputs(n, v, dtype, seed=9)
    target = target.clamp(0, v - 1)
    g = torch.Generator().manual_seed(9)
    gs = [torch.randn(n, generator=g) for _ in range(3)]
    gs[0][::5] = 0

    def reference(of: torch.dtype) -> Tensor:
        leaf = logits.to(of, copy=True).requires_grad_()
        logps = torch.log_softmax(leaf / temperature if temperature else leaf, -1)
        y = leaf / temperature if temperature else leaf
        parts = [logps.gather(1, target[:, None])[:, 0], y.logsumexp(-1), -(logps.exp() * logps).sum(-1)]
        torch.autograd.backward(parts, [x.to(of) for x in gs])
        return leaf.grad.double()

    exact = reference(torch.float64)
    leaf = logits.cuda().requires_grad_()
    out = vs.vocab_parallel_logp(leaf, target.cuda(), temperature=temperature, return_entropy=True)
    torch.autograd.backward([out.logp, out.lse, out.entropy], [x.cuda() for x in gs])
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    ours, theirs = (leaf.grad.cpu().double() - exact).abs(), (reference(torch.float32) - exact).abs()
    assert ours.max() <= 2 * theirs.max() + rounding * exact.abs().max()


def assert_same_gradient(actual: Tensor, expected: Tensor, what: str) -> None:
    """The same bytes, of NaNs the same places."""
    nan = expected.isnan()
    assert torch.equal(actual.cpu().isnan(), nan), what
    assert_same_bytes(torch.where(nan, 0.0, actual.cpu()), torch.where(nan, 0.0, expected), what)


@pytest.mark.parametrize("v", [96, 1000, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.6, "rows"])
def test_gradients_equal_the_cpu(dtype: torch.dtype, entropy: bool, temperature: float | str | None, v: int) -> None:
    names, hard = stacked_hard_rows(96)
    logits, target = inputs(61 + len(names), v, dtype, seed=v)
    logits[61:] = -INF
    logits[61:, :96] = hard.to(dtype)
    n = len(logits)
    g = torch.Generator().manual_seed(v)
    t = torch.rand(n, generator=g) + 0.5 if temperature == "rows" else temperature
    upstream = [torch.randn(n, generator=g) for _ in range(3 if entropy else 2)]
    for grad in upstream:
        grad[::5] = 0
    upstream[0][7], upstream[1][8] = INF, -INF

    def run(device: str) -> Tensor:
        leaf = logits.to(device, copy=True).requires_grad_()
        moved = t.to(device) if isinstance(t, Tensor) else t
        out = vs.vocab_parallel_logp(leaf, target.to(device), temperature=moved, return_entropy=entropy, validate=False)
        torch.autograd.backward(out[: len(upstream)], [grad.to(device) for grad in upstream])
        return leaf.grad

    want = run("cpu")
    assert_same_gradient(run("cuda"), want, f"v {v}")
    assert (want[::5] == 0).all()


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_of_repeated_rows_equal_the_cpu(entropy: bool) -> None:
    logits, _ = inputs(9, 1000, torch.float32)
    rows = torch.tensor([7, 0, 7, 3, 7, 0])
    target = torch.arange(6) * 150
    upstream = [torch.randn(6, generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def run(device: str) -> Tensor:
        leaf = logits.to(device, copy=True).requires_grad_()
        out = vs.batch_invariant_logp(
            leaf, target.to(device), rows=rows.to(device), return_entropy=entropy, return_lse=True, validate=False
        )
        parts = [out.logp, out.entropy if entropy else out.lse]
        torch.autograd.backward(parts, [grad.to(device) for grad in upstream])
        return leaf.grad

    assert_same_gradient(run("cuda"), run("cpu"), "repeated rows")


def test_upstream_of_one_number_for_all_rows() -> None:
    logits, target = inputs(33, 1000)
    leaf = logits.cuda().requires_grad_()
    vs.batch_invariant_logp(leaf, target.cuda()).sum().backward()
    want = gradients(logits.cuda(), target.cuda(), torch.ones(33, device="cuda"))
    assert_same_bytes(leaf.grad, want)


def test_inplace_backward() -> None:
    logits, target = inputs(129, V, seed=10)
    t, upstream = target.cuda(), torch.randn(129, generator=torch.Generator().manual_seed(10)).cuda()
    want = gradients(logits.cuda(), t, upstream)
    leaf = logits.cuda().requires_grad_()
    mine = leaf * 1
    vs.batch_invariant_logp(mine, t, inplace_backward=True).backward(upstream)
    assert_same_bytes(leaf.grad, want)
    assert_same_bytes(mine.detach(), want, "the logits hold the gradient")


# ---- memory, large offsets, streams, graphs ----


def peak(of: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = of()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def test_memory() -> None:
    n = 4096
    x = torch.randn(n, 32768, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(0, 32768, (n,), device="cuda")
    outputs = 5 * n * 4
    score(x, target)
    with torch.no_grad():
        assert peak(lambda: vs.batch_invariant_logp(x, target)) <= outputs + 8 * 512
    logp = vs.batch_invariant_logp(x, target)
    upstream = torch.ones_like(logp)
    assert peak(lambda: torch.autograd.grad(logp, x, upstream, retain_graph=True)) <= x.numel() * 2 + 512
    copy = x * 1
    logp = vs.batch_invariant_logp(copy, target, inplace_backward=True)
    assert peak(lambda: torch.autograd.grad(logp, copy, upstream)) <= 8 * 512


@pytest.mark.parametrize("v", [151936, 151935])
def test_offsets_past_two_to_the_31(v: int) -> None:
    n = 2**31 // v + 40
    x = torch.empty(n, v, dtype=torch.bfloat16, device="cuda")
    for begin in range(0, n, 1024):
        x[begin : begin + 1024].normal_(generator=torch.Generator("cuda").manual_seed(begin))
    target = torch.randint(0, v, (n,), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    whole = score(x, target)
    rows = slice(n - 40, n)
    assert_same_output(score(x[rows].clone(), target[rows]), whole, "last rows", rows)
    assert_same_output(score(x[rows].cpu(), target[rows].cpu()), whole, "last rows on the CPU", rows)
    upstream = torch.randn(n, device="cuda")
    grad = gradients(x, target, upstream)
    assert_same_bytes(grad[rows], gradients(x[rows].clone(), target[rows], upstream[rows]), "gradient of the last rows")
    pick = torch.arange(n - 1, n - 60, -3, device="cuda")
    assert_same_output(score(x, target[pick], rows=pick), whole, "rows=", pick)


def test_rows_out_of_range_touch_nothing() -> None:
    logits, target = inputs(5, 100)
    rows = torch.tensor([0, -1, 4, 5, 2**40], device="cuda")
    target = target.clamp(0, 99).cuda()
    with pytest.raises(ValueError, match="rows must lie in"):
        vs.batch_invariant_logp(logits.cuda(), target, rows=rows)
    x = logits.cuda().requires_grad_()
    logp = vs.batch_invariant_logp(x, target, rows=rows, validate=False)
    assert logp.isnan().tolist() == [False, True, False, True, True]
    logp[[0, 2]].sum().backward()
    assert (x.grad[[1, 2, 3]] == 0).all()


def test_rows_of_a_large_problem() -> None:
    x = torch.randn(700, 16392, device="cuda").bfloat16()
    target = torch.randint(0, 16392, (700,), device="cuda")
    target[::5] = 16391  # in the columns behind the last whole tile
    whole = score(x, target)
    order = torch.randperm(700, device="cuda").repeat(2)[:1111]
    assert_same_output(score(x, target[order], rows=order), whole, "rows=", order)
    bad = order.clone()
    bad[::3] = 700
    some = score(x, target[order], rows=bad)
    assert some.logp[::3].isnan().all() and some.lse[::3].isnan().all()
    assert_same_bytes(some.logp[1::3], whole.logp[order[1::3]], "beside rows out of range")


def test_another_stream_at_the_same_time() -> None:
    logits, target = inputs(300, 32768, seed=11)
    x, t = logits.cuda(), target.cuda()
    want = score(x, t)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    got = []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(score(x, t))
    torch.cuda.synchronize()
    for out in got:
        assert_same_output(out, want, "another stream")


@pytest.mark.parametrize("n", [1, 16, 700])
def test_graph_capture(n: int) -> None:
    logits, target = inputs(n, 32768, seed=12)
    x, t = torch.zeros_like(logits, device="cuda"), target.cuda()
    upstream = torch.randn(n, generator=torch.Generator().manual_seed(12)).cuda()

    def step():
        leaf = x.detach().requires_grad_()
        out = score(leaf, t)
        return out, torch.autograd.grad(out.logp, leaf, upstream)[0]

    step()
    graphs, outs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(step())
        graphs.append(graph)
    x.copy_(logits)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    want, grad = step()
    for out, gradient in outs:
        assert_same_output(out, want, "graph")
        assert_same_bytes(gradient, grad, "gradient in a graph")


def test_backward_in_another_thread_and_twice() -> None:
    logits, target = inputs(33, 4099)
    x = logits.cuda().requires_grad_()
    logp = vs.batch_invariant_logp(x, target.cuda())
    want = torch.autograd.grad(logp, x, torch.ones_like(logp), retain_graph=True)[0]
    thread = threading.Thread(target=lambda: logp.sum().backward())
    thread.start()
    thread.join()
    assert_same_bytes(x.grad, want)


def test_empty() -> None:
    x = torch.empty(0, 100, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    logp = vs.batch_invariant_logp(x, torch.empty(0, dtype=torch.int64, device="cuda"))
    logp.sum().backward()
    assert logp.shape == (0,) and x.grad.shape == (0, 100)
    records = gpu().logits_forward(
        torch.ones(3, 16, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda"), None,
        LocalProblem(0, 0, None, True), None,
    )  # fmt: skip
    expected = cpu.logits_forward(torch.ones(3, 16), torch.zeros(3, dtype=torch.int64), None,
                                  LocalProblem(0, 0, None, True), None)  # fmt: skip
    assert_same_bytes(records.cpu(), expected)
