"""The Hopper backward under a cut, to the byte: what it would give if all that is left out were -inf."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import sampling as S
from vocabshard.kernels.problem import LocalProblem, RowGrads, SavedRows
from vocabshard.testing.compare import assert_same_bytes

pytestmark = pytest.mark.needs("sm90")

INF = float("inf")
PROGRAM = vs.SamplingProgram.of(top_k=7)
NAMES = ("hidden", "weight", "bias")


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def problem(n: int, d: int, v: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(n + v)
    hidden = torch.randn(n, d, generator=g).to(dtype)
    twos = torch.arange(v) // 2  # equals, that a cut may split
    weight = (torch.randn(v, d, generator=g) * (3 / d**0.5))[twos].to(dtype)
    return hidden, weight, torch.randn(v, generator=g)[twos], torch.randint(0, v, (n,), generator=g)


def gradients(x: tuple[Tensor, ...], gs: Tensor, **options) -> list[Tensor]:
    hidden, weight, bias, target = x
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight, bias)]
    out = vs.linear_logp(
        *leaves[:2], target, leaves[2], return_lse=True, return_entropy=True, backend="sm90", **options
    )
    torch.autograd.backward([out.logp, out.lse, out.entropy][: len(gs)], list(gs))
    return [t.grad for t in leaves]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature, softcap", [(None, None), ("rows", None), (None, 5.0), ("rows", 30.0)])
def test_dlogits_are_those_without_a_cut_or_zero(dtype, entropy: bool, temperature, softcap) -> None:
    """From the same terms of the rows, whatever is cut: both launches of the kernel, by block and by shard."""
    from vocabshard.kernels import sm90
    from vocabshard.kernels.sm90_terms import RowTerms

    n, v, start = 333, 1203, 32000
    hidden, weight, bias, target = problem(n, 64, v, dtype)
    scale = torch.linspace(0.5, 1.5, n) if temperature == "rows" else None
    share = LocalProblem(start, v - 2, softcap, entropy)
    _, z = sm90.forward(hidden, weight, bias, target + start, scale, share, want_logits=True)
    places = S.place_of(z[:, : v - 2], torch.arange(start, start + v - 2)).sort(dim=1, descending=True).values
    keep = torch.randint(0, v - 2, (n,))
    cut = places.gather(1, keep[:, None])[:, 0].contiguous()
    cut[0], cut[1], cut[2] = S.KEEP_ALL, places[1, 0], places[2, 0] + 1  # all, one, and none here: another shard's
    saved = SavedRows(torch.randint(20, 28, (n,), dtype=torch.int32), torch.rand(n) - 0.5, torch.rand(n))
    gs = torch.randn(3, n)
    gs[:, 5::7] = 0
    grads = RowGrads(gs[0], gs[1], gs[2] if entropy else None)
    found = []
    for given in (None, cut):
        terms = RowTerms(hidden, target + start, scale, share, saved, grads, True, given)
        terms.plain = False
        out, sums = torch.empty(n, 1280, dtype=dtype), torch.empty(-(-n // 128), 1280)
        blocks = []
        for rows in (slice(0, n), slice(128, n)):
            for first, last in ((0, 384), (384, v - 2)):
                dz = terms.block(rows, first, weight[first:last], bias, None, out, sums)
                blocks += [dz.clone(), sums[rows.start // 128 :, : last - first].clone()]
        found.append(blocks)
    left = S.left_out(z[:, : v - 2], start, cut)
    assert not left[0].any() and left[2].all() and left[1].sum() == v - 3
    without = [torch.cat(found[0][i : i + 4 : 2], 1) for i in (0, 4)]
    under = [torch.cat(found[1][i : i + 4 : 2], 1) for i in (0, 4)]
    for a, b, first in zip(under, without, (0, 128), strict=True):
        want = b.masked_fill(left[first:], 0.0)
        # the zero's sign is that of the row's factor
        assert_same_bytes(a + 0.0, want + 0.0, "dz")
        assert not a[left[first:]].any() and b[left[first:]].any()
    sums = torch.cat(found[1][1:4:2], 1)
    rounded = under[0].float()
    assert ((sums.sum(0) - rounded.sum(0)).abs() <= 4e-3 * rounded.abs().sum(0) + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature, softcap, outputs", [(None, None, 1), (0.7, None, 3), ("rows", 20.0, 2)])
def test_one_set_for_all_rows_is_a_bias_of_minus_infinity(dtype, temperature, softcap, outputs: int) -> None:
    n, v = 300, 5003
    x = hidden, weight, bias, target = problem(n, 128, v, dtype)
    kept = torch.arange(v) % 7 == 3
    bias += torch.where(kept, 40.0 if softcap is None else 60.0, 0.0)
    target[:] = kept.nonzero()[target % int(kept.sum())][:, 0]
    t = torch.linspace(0.5, 1.5, n) if temperature == "rows" else temperature
    options = {"temperature": t, "softcap": softcap}
    z = vs.linear_logp(hidden, weight, target, bias, softcap=softcap, return_logits=True, backend="sm90").logits
    last = z.masked_fill(~kept, INF).min(1).values
    assert (z.masked_fill(kept, -INF).max(1).values < last).all()
    cut = S.make_cut(last)
    gs = torch.randn(outputs, n)
    got = gradients(x, gs, sampling=PROGRAM, cut=cut, **options)
    masked = bias.masked_fill(~kept, -INF)
    want = gradients((hidden, weight, masked, target), gs, **options)
    for g, w, name in zip(got, want, NAMES, strict=True):
        assert_same_bytes(g + 0.0, w + 0.0, f"grad_{name}")
    budget = vs.GradOptions(save_logits_budget="auto")
    for g, w, name in zip(
        gradients(x, gs, sampling=PROGRAM, cut=cut, grad_options=budget, **options),
        gradients((hidden, weight, masked, target), gs, grad_options=budget, **options),
        NAMES, strict=True,
    ):  # fmt: skip
        assert_same_bytes(g + 0.0, w + 0.0, f"grad_{name} of kept logits")


def test_rows_blocks_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of grad_hidden depends on nothing but itself, and no byte on how blocks are cut."""
    from vocabshard.kernels import sm90_backward

    n, v = 500, 5003
    hidden, weight, bias, _ = problem(n, 64, v)
    drawn = vs.vocab_parallel_sample(hidden, weight, bias, program=PROGRAM, seed=1)
    x = (hidden, weight, bias, drawn.token)
    gs = torch.randn(3, n)
    whole = gradients(x, gs, sampling=PROGRAM, cut=drawn.cut)
    for rows in (slice(0, 1), slice(7, 8), slice(100, 229), slice(499, 500)):
        part = (hidden[rows], weight, bias, drawn.token[rows])
        got = gradients(part, gs[:, rows], sampling=PROGRAM, cut=drawn.cut[rows])
        assert_same_bytes(got[0], whole[0][rows], f"rows {rows}")
    for name, value in (("WORKSPACE", 1 << 21), ("MOST_ROWS", 256)):
        with monkeypatch.context() as patch:
            patch.setattr(sm90_backward, name, value)
            for g, w in zip(gradients(x, gs, sampling=PROGRAM, cut=drawn.cut), whole, strict=True):
                assert_same_bytes(g, w, name)


@pytest.mark.parametrize("d", [9, 100])
def test_operands_that_the_copy_engine_cannot_read(d: int) -> None:
    hidden, weight, bias, _ = problem(77, d, 1000)
    x = (hidden, weight, bias, vs.vocab_parallel_sample(hidden, weight, bias, program=PROGRAM, seed=1).token)
    found = vs.linear_logp(hidden, weight, x[3], bias, sampling=PROGRAM, return_lse=True)
    wide = torch.zeros(1000, 104, dtype=torch.bfloat16)
    wide[:, :d] = weight
    long = torch.zeros(77, 104, dtype=torch.bfloat16)
    long[:, :d] = hidden
    gs = torch.randn(1, 77)
    got = gradients(x, gs, sampling=PROGRAM, cut=found.cut)
    want = gradients((long, wide, bias, x[3]), gs, sampling=PROGRAM, cut=found.cut)
    for g, w, name in zip(got, want, NAMES, strict=True):
        assert_same_bytes(g, w[..., :d] if name != "bias" else w, f"grad_{name}")


def test_in_a_graph_without_waiting_and_within_the_workspace() -> None:
    hidden, weight, _, _ = problem(2048, 128, 50258)
    drawn = vs.vocab_parallel_sample(hidden, weight, program=PROGRAM, seed=1)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def run() -> tuple[Tensor, ...]:
        logp = vs.linear_logp(h, w, drawn.token, sampling=PROGRAM, cut=drawn.cut, backend="sm90")
        return torch.autograd.grad(logp.sum(), (h, w))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            want = run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 2 * (h.numel() + w.numel()) + 4 * h.numel() + (256 << 20) + 64 * 2048, used
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    for g, a, x in zip(got, again, want, strict=True):
        assert_same_bytes(g, x)
        assert_same_bytes(a, x)
