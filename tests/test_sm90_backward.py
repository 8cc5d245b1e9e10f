"""The Hopper backward: against fp64 and against torch's own error, exact zeros, rows independent of their batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.kernels.problem import GradPlan, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.testing.compare import assert_same_bytes
from vocabshard.testing.dlogits import dlogits

pytestmark = pytest.mark.needs("sm90")

INF = float("inf")


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def problem(
    n: int, d: int, v: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, spread: float = 3.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(n, d, generator=g).to(dtype)
    weight = (torch.randn(v, d, generator=g) * (spread / d**0.5)).to(dtype)
    return hidden, weight, torch.randn(v, generator=g), torch.randint(0, v, (n,), generator=g)


def upstream(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Different in every row, some exactly 0, some negative."""
    g = torch.Generator("cuda").manual_seed(seed + 99)
    gs = torch.randn(3, n, generator=g)
    gs[:, ::5] = 0
    return gs[0], gs[1], gs[2]


def ours(hidden, weight, bias, target, gs, **options) -> tuple[Tensor, Tensor, Tensor | None]:
    h, w = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    b = None if bias is None else bias.detach().clone().requires_grad_()
    out = vs.linear_logp(h, w, target, b, return_lse=True, return_entropy=True, backend="sm90", **options)
    pairs = [(o, g) for o, g in zip((out.logp, out.lse, out.entropy), gs, strict=True) if g is not None]
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return h.grad, w.grad, None if b is None else b.grad


def check(hidden, weight, bias, target, gs, **options) -> None:
    """No gradient is further from fp64 than that of fp32 softmax with products in the operands' dtype."""
    got = ours(hidden, weight, bias, target, gs, **options)
    exact = dlogits(hidden, weight, bias, target, gs, torch.float64, **options)
    plain = dlogits(hidden, weight, bias, target, gs, torch.float32, **options)
    rounded = plain.to(hidden.dtype)
    want = (exact @ weight.double(), exact.T @ hidden.double(), exact.sum(0))
    theirs = (rounded @ weight, rounded.T @ hidden, plain.sum(0).to(bias.dtype if bias is not None else plain.dtype))
    for g, t, w, name in zip(got, theirs, want, ("hidden", "weight", "bias"), strict=True):
        if g is None:
            continue
        error, bar = (g.double() - w).norm(), (t.double() - w).norm()
        # the same roundings of nearly the same values: some hundredths are chance, and so are the last bits of fp32
        limit = max(1.01 * bar, 2e-7 * w.norm())
        assert error <= limit, f"grad_{name}: {error:.4e}, torch {bar:.4e}, of {w.norm():.4e}"


@pytest.mark.parametrize(
    "n, d, v",
    [
        *(
            (1, 8, 50),
            (33, 104, 1000),
            (257, 64, 777),
            (128, 256, 384),
            (129, 64, 50257),
            (129, 64, 151936),
            (1000, 512, 4097),
        ),
        *((1100, 256, 50257), (1300, 2048, 9000), (300, 4096, 2000)),  # odd and even blocks of rows, many tiles in turn
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_fp64(n: int, d: int, v: int, dtype: torch.dtype) -> None:
    hidden, weight, bias, target = problem(n, d, v, dtype)
    check(hidden, weight, None, target, upstream(n))
    check(hidden, weight, bias, target, upstream(n))
    check(hidden, weight, bias.to(dtype), target, (upstream(n)[0], None, None))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_output_alone(which: int) -> None:
    hidden, weight, bias, target = problem(300, 128, 5003)
    gs = tuple(g if i == which else None for i, g in enumerate(upstream(300)))
    check(hidden, weight, bias, target, gs)
    check(hidden, weight, None, target, gs)


@pytest.mark.parametrize("temperature", [0.7, "rows"])
@pytest.mark.parametrize("softcap", [None, 5.0, 30.0])
def test_temperature_and_softcap(temperature, softcap) -> None:
    hidden, weight, bias, target = problem(200, 128, 5003)
    t = torch.rand(200) + 0.5 if temperature == "rows" else temperature
    check(hidden, weight, bias, target, upstream(200), temperature=t, softcap=softcap)
    check(hidden, weight, None, target, (upstream(200)[0], None, None), temperature=t, softcap=softcap)


@pytest.mark.parametrize("offset", [100.0, 1e4, -1e4, 1e5])
def test_offsets(offset: float) -> None:
    hidden, weight, bias, target = problem(200, 128, 5003)
    check(hidden, weight, bias + offset, target, upstream(200))
    check(hidden, weight, bias + offset, target, (upstream(200)[0], None, None))


def test_near_certain_targets_keep_their_gradient() -> None:
    weight = torch.zeros(4, 8, dtype=torch.bfloat16)
    weight[:, 0] = torch.tensor([0.0, -14.0, -15.0, -16.5])
    h = torch.ones(1, 8, dtype=torch.bfloat16).requires_grad_()
    w = weight.clone().requires_grad_()
    vs.linear_logp(h, w, torch.tensor([0]), backend="sm90").sum().backward()
    hd, wd = torch.ones(1, 8).double().requires_grad_(), weight.double().requires_grad_()
    torch.log_softmax(hd @ wd.T, -1)[0, 0].backward()
    assert w.grad[0, 0] != 0
    torch.testing.assert_close(w.grad.double(), wd.grad, rtol=0.05, atol=1e-9)


def test_equal_bytes_run_to_run_and_what_is_not_wanted() -> None:
    hidden, weight, bias, target = problem(333, 64, 5003)
    gs = upstream(333)
    whole = ours(hidden, weight, bias, target, gs)
    for a, b in zip(ours(hidden, weight, bias, target, gs), whole, strict=True):
        assert_same_bytes(a, b)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        leaves = [x.clone().requires_grad_(n) for x, n in zip((hidden, weight, bias), needs, strict=True)]
        out = vs.linear_logp(*leaves[:2], target, leaves[2], return_lse=True, return_entropy=True, backend="sm90")
        torch.autograd.backward([out.logp, out.lse, out.entropy], list(gs))
        for leaf, need, want in zip(leaves, needs, whole, strict=True):
            assert (leaf.grad is not None) == need
            if need:
                assert_same_bytes(leaf.grad, want)


def test_rows_do_not_depend_on_their_batch() -> None:
    hidden, weight, bias, target = problem(600, 64, 5003)
    gs = upstream(600)
    whole = ours(hidden, weight, bias, target, gs)[0]
    for n in (1, 2, 17, 64, 127, 128, 129, 257):
        for first in (0, 5, 600 - n):
            rows = slice(first, first + n)
            got = ours(hidden[rows], weight, bias, target[rows], tuple(g[rows] for g in gs))[0]
            assert_same_bytes(got, whole[rows], f"{n} rows from {first}")


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("d, v", [(64, 5003), (512, 1100)])
def test_a_probe_row_in_batches_of_every_size(d: int, v: int, seed: int) -> None:
    """Alone, and at the front, in the middle and at the back of batches of others."""
    sizes = sorted({*range(1, 10), *(2**k + i for k in range(3, 12) for i in (-1, 0, 1) if 2**k + i <= 2048)})
    others = problem(2048, d, v, seed=seed)
    hidden, weight, bias, target = others
    gs = upstream(2048, seed)
    probe = torch.randn(1, d, generator=torch.Generator("cuda").manual_seed(seed + 7)).to(hidden.dtype)
    own_target, own_gs = torch.tensor([v // 2]), tuple(torch.tensor([x]) for x in (0.8, -0.3, 0.5))
    alone = ours(probe, weight, bias, own_target, own_gs)[0]

    def with_probe(x: Tensor, own: Tensor, n: int, at: int) -> Tensor:
        return torch.cat([x[:at], own, x[at : n - 1]])

    for n in sizes:
        for at in sorted({0, n // 2, n - 1}):
            batch = (with_probe(hidden, probe, n, at), weight, bias, with_probe(target, own_target, n, at))
            batch_gs = tuple(with_probe(g, own, n, at) for g, own in zip(gs, own_gs, strict=True))
            assert_same_bytes(ours(*batch, batch_gs)[0][at], alone[0], f"row {at} of {n}")


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 1e5])
def test_fp32_loses_no_digits_at_offsets(offset: float) -> None:
    """Logits are made again by the forward's own chain: one that rounds otherwise is off by 1e-3 at 1e4."""
    hidden, weight, bias, target = problem(300, 768, 9000, torch.float32)
    gs = upstream(300)
    for b in (bias + offset, (bias + offset).bfloat16()):
        got = ours(hidden, weight, b, target, gs)
        exact = dlogits(hidden, weight, b, target, gs, torch.float64)
        wants = (exact @ weight.double(), exact.T @ hidden.double())
        for g, want, name in zip(got, wants, ("hidden", "weight"), strict=False):
            assert (g.double() - want).norm() < 2e-6 * want.norm(), name


@pytest.mark.parametrize("columns", [(100, 3), (5003, 77), (1024, 0)])
def test_padding_masked_ignored_and_broken(columns: tuple[int, int]) -> None:
    v, pad = columns
    n = 150
    hidden, weight, bias, target = problem(n, 64, v)
    weight[v - pad :] = float("nan")
    bias[v - pad :] = INF
    bias[10:20] = -INF
    target = torch.where((target >= v - pad) | ((target >= 10) & (target < 20)), 0, target)
    target[7] = 12  # its own logit is -inf
    ignored = torch.arange(n) % 3 == 0
    target[ignored] = -100
    broken = hidden.clone()
    broken[ignored] = float("nan")
    broken[ignored & (torch.arange(n) % 2 == 0)] = INF
    h, w, b = (x.clone().requires_grad_() for x in (broken, weight, bias))
    logp = vs.linear_logp(h, w, target, b, real_vocab_size=v - pad, backend="sm90")
    logp[~ignored & (torch.arange(n) != 7)].sum().backward()
    assert (h.grad[ignored] == 0).all() and (h.grad[7] == 0).all()
    assert torch.isfinite(h.grad).all() and torch.isfinite(w.grad).all() and torch.isfinite(b.grad).all()
    assert (w.grad[10:20] == 0).all() and (b.grad[10:20] == 0).all()
    assert (w.grad[v - pad :] == 0).all() and (b.grad[v - pad :] == 0).all()
    # a NaN in a row that counts is seen, in its own row
    h, w = broken.clone().requires_grad_(), weight[: v - pad].clone().requires_grad_()
    h.data[1, 3] = float("nan")
    vs.linear_logp(h, w, target, backend="sm90").sum().backward()
    assert torch.isnan(h.grad[1]).all() and torch.isfinite(h.grad[2:]).all() and torch.isnan(w.grad).all()
    # every logit -inf
    h = hidden.clone().requires_grad_()
    vs.linear_logp(h, weight[: v - pad], target, torch.full((v - pad,), -INF), backend="sm90").sum().backward()
    assert (h.grad == 0).all()


def test_blocks_change_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    from vocabshard.kernels import sm90_backward

    hidden, weight, bias, target = problem(500, 64, 5003)
    args = (hidden, weight, bias, target, upstream(500))
    want = ours(*args)
    monkeypatch.setattr(sm90_backward, "WORKSPACE", 1 << 21)
    got = ours(*args)
    for g, w, name in zip(got, want, ("hidden", "weight", "bias"), strict=True):
        assert_same_bytes(g, w, name)


def test_against_the_torch_operations() -> None:
    """Two backwards that share nothing but their inputs, in the kernel interface's own terms."""
    from vocabshard.kernels import blockwise, sm90

    hidden, weight, bias, target = problem(300, 128, 3000)
    share = LocalProblem(1000, 2990, None, True)
    target = target + 1000
    out = vs.linear_logp(hidden, weight[:2990], target - 1000, bias[:2990], return_lse=True, return_entropy=True)
    lse2 = out.lse.double() * 1.4426950408889634
    saved = SavedRows(lse2.round().int(), (lse2 - lse2.round()).float(), out.entropy)
    gs = upstream(300)
    grads = RowGrads(gs[0], gs[1] - gs[0], gs[2])
    seen: list[Tensor] = []
    accumulators, main = torch.randn(300, 128), torch.randn(3000, 128)
    plan = GradPlan(main_grad=main.clone(), grad_hidden=accumulators.clone(), hidden_ready=seen.append)
    arguments = (hidden, weight, bias, target, None, share, saved, grads, Needs(True, True, True))
    got = sm90.backward(*arguments, plan)
    want = blockwise.backward(*arguments)
    assert got[1] is None and got[0] is plan.grad_hidden and seen == [plan.grad_hidden]
    found = (got[0] - accumulators, plan.main_grad - main, got[2])
    for g, w, bound in zip(found, want, (2e-3, 4e-3, 1e-5), strict=True):
        assert (g - w).norm() < bound * w.norm()


def test_rows_are_handed_over_in_parts_of_the_same_bytes() -> None:
    from vocabshard.kernels import sm90

    n, v = 500, 3000
    hidden, weight, _, target = problem(n, 64, v)
    saved = SavedRows(torch.zeros(n, dtype=torch.int32), torch.full((n,), 11.0), None)
    grads = RowGrads(torch.randn(n), torch.randn(n), None)
    arguments = (hidden, weight, None, target, None, LocalProblem(0, v, None, False), saved, grads)
    want = sm90.backward(*arguments, Needs(True, True, False))
    parts = (slice(0, 100), slice(100, 356), slice(356, n))
    seen: list[Tensor] = []
    got = sm90.backward(
        *arguments,
        Needs(True, True, False),
        GradPlan(hidden_ready=lambda x: seen.append(x.clone()), ready_rows=parts),
    )
    assert_same_bytes(got[0], want[0], "grad_hidden")
    assert_same_bytes(got[1], want[1], "grad_weight")
    for part, rows in zip(seen, parts, strict=True):
        assert_same_bytes(part, want[0][rows], f"complete when it was handed over, {rows}")


@pytest.mark.parametrize("n, v", [(65536, 151936), (4096, 50257), (70000, 1000)])
def test_memory_beside_the_gradients_is_bounded(n: int, v: int) -> None:
    hidden, weight, _, target = problem(n, 64, v)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    logp = vs.linear_logp(h, w, target, backend="sm90")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logp.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 2 * h.grad.numel() + 2 * w.grad.numel()
    assert peak <= gradients + (256 << 20) + 4 * n * 64 + 16 * n


def test_short_chains_of_fp16_depend_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from vocabshard.kernels import sm90_backward

    hidden, weight, bias, target = problem(700, 64, 9000, torch.float16)
    args = (hidden, weight, bias, target, upstream(700))
    want = ours(*args)
    for n in (1, 7, 129, 513):
        rows = slice(90, 90 + n)
        part = ours(hidden[rows], weight, bias, target[rows], tuple(g[rows] for g in args[4]))
        assert_same_bytes(part[0], want[0][rows], f"{n} rows")
    monkeypatch.setattr(sm90_backward, "WORKSPACE", 6 << 20)
    for g, w, name in zip(ours(*args), want, ("hidden", "weight", "bias"), strict=True):
        assert_same_bytes(g, w, name)


def test_rows_in_blocks_go_on_in_one_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    from vocabshard.kernels import sm90_backward

    hidden, weight, bias, target = problem(700, 64, 3000)
    args = (hidden, weight, bias, target, upstream(700))
    want = ours(*args)
    monkeypatch.setattr(sm90_backward, "MOST_ROWS", 256)
    got = ours(*args)
    for g, w, name in zip(got, want, ("hidden", "weight", "bias"), strict=True):
        assert_same_bytes(g, w, name)


@pytest.mark.parametrize("d", [9, 100])
def test_operands_that_the_copy_engine_cannot_read(d: int) -> None:
    hidden, weight, bias, target = problem(77, d, 1000)
    check(hidden, weight, bias, target, upstream(77))
    wide = torch.randn(1000, 2 * d).bfloat16()
    check(hidden, wide[:, :d], bias, target, upstream(77))


def test_frozen_operands_cost_nothing() -> None:
    hidden, weight, _, target = problem(2048, 256, 50257)
    for frozen in ("weight", "hidden"):
        h = hidden.detach().clone().requires_grad_(frozen != "hidden")
        w = weight.detach().clone().requires_grad_(frozen != "weight")
        logp = vs.linear_logp(h, w, target, backend="sm90")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        logp.sum().backward()
        gradient = 2 * (w if frozen == "hidden" else h).numel()
        kept = 4 * h.numel() if frozen == "weight" else 0
        assert (h.grad is None) == (frozen == "hidden") and (w.grad is None) == (frozen == "weight")
        assert torch.cuda.max_memory_allocated() - before <= gradient + kept + (256 << 20)


def test_captured_in_a_graph() -> None:
    hidden, weight, _, target = problem(300, 128, 5003)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            want = torch.autograd.grad(vs.linear_logp(h, w, target, backend="sm90").sum(), (h, w))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(vs.linear_logp(h, w, target, backend="sm90").sum(), (h, w))
    graph.replay()
    for g, x in zip(got, want, strict=True):
        assert_same_bytes(g, x)


def test_on_the_callers_stream_and_without_waiting() -> None:
    hidden, weight, _, target = problem(200, 128, 5003)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    want = torch.autograd.grad(vs.linear_logp(h, w, target, backend="sm90").sum(), (h, w))
    side = torch.cuda.Stream()
    late = torch.full_like(hidden, float("nan")).requires_grad_()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late.data.copy_(hidden)
            got = torch.autograd.grad(vs.linear_logp(late, w, target, backend="sm90").sum(), (late, w))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    for g, x in zip(got, want, strict=True):
        assert_same_bytes(g, x)
