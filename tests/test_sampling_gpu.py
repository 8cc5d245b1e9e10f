"""Sampling on a Hopper GPU: the bytes of kernels/sampling_torch.py, in whole rows, shards, and the fused forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import cuts
from vocabshard import sampling as S
from vocabshard.cuts import Block, Over
from vocabshard.kernels.problem import LocalProblem
from vocabshard.sampling import SamplingProgram
from vocabshard.testing.compare import assert_same_bytes

pytestmark = pytest.mark.needs("sm90")

N, SEED = 9, 1234567890123
PROBLEM = LocalProblem(vocab_start=0, valid=0, softcap=None, entropy=False)
PROGRAMS = [
    SamplingProgram(),
    SamplingProgram.of(temperature=0.7),
    SamplingProgram.of(top_k=1),
    SamplingProgram.of(top_k=50),
    SamplingProgram.of(top_k=5000),
    SamplingProgram.of(top_p=0.9),
    SamplingProgram.of(top_p=0.999),
    SamplingProgram.of(top_p=1e-6),
    SamplingProgram.of(min_p=0.05),
    SamplingProgram.of(0.8, 0.01, 40, 0.95),
    SamplingProgram((("top_p", 0.8), ("top_k", 20))),
    SamplingProgram((("top_p", 0.95), ("temperature", 1.7), ("top_p", 0.5))),
    SamplingProgram.of(temperature=0),
]


def logits_of(columns: int, kind: str, stride: int = 0) -> Tensor:
    g = torch.Generator(device="cuda").manual_seed(columns)
    x = torch.randn(N, columns + stride, generator=g, device="cuda")
    x *= 1 + 3 * torch.rand(N, 1, generator=g, device="cuda")
    x = x[:, :columns]
    if kind == "ties":
        x.copy_((x * 2).round() / 2)
    if kind == "bf16":
        x.copy_(x.bfloat16())
    if kind == "mask":
        x[torch.rand(N, columns, generator=g, device="cuda") < 0.4] = float("-inf")
    if kind == "shift":
        x += 1e4
    if kind == "sorted":
        x.copy_(x.sort(1).values)
    if kind == "peaked":
        x[:, columns // 3] += 30
    if kind == "hard":
        x[0] = float("-inf")
        x[1, columns // 2] = float("nan")
        x[2, 0] = float("inf")
        x[3] = 0.0
        x[4] = -(2.0**21)
        x[5] = 3e6
        x[6, : columns // 2] = -0.0
        x[6, columns // 2 :] = 0.0
    return x


@pytest.fixture(scope="module")
def kernels():
    """The torch operations, and Hopper's."""
    from vocabshard.kernels import cuda_logits, sampling_torch, sm90

    return sampling_torch.functions(cuda_logits), sampling_torch.functions(sm90)


LAYOUTS = [
    (1, "plain", 0), (8, "plain", 0), (17, "ties", 0), (1000, "plain", 0), (50257, "plain", 0), (50257, "ties", 3),
    (151936, "plain", 0), (151936, "bf16", 0), (151936, "peaked", 0), (151936, "ties", 0), (4000, "mask", 1),
    (4000, "shift", 0), (3000, "hard", 0), (151936, "hard", 5), (300000, "mask", 0),
]  # fmt: skip


@pytest.mark.parametrize("columns, kind, stride", LAYOUTS)
def test_the_bytes_of_torch_operations(kernels, columns: int, kind: str, stride: int) -> None:
    from vocabshard.kernels import cuda_logits

    reference, ours = kernels
    assert ours.rows is not None and ours.maxima is not reference.maxima
    z = logits_of(columns, kind, stride)
    problem = replace(PROBLEM, valid=columns - (3 if columns > 8 else 0))
    keys = torch.arange(N, device="cuda") * 7 - 3
    over, block = Over(None), [Block(z, problem)]
    assert_same_bytes(ours.maxima(z, problem), reference.maxima(z, problem), "maxima")
    maxima = cuts.find_maxima(reference, block, over)
    target = torch.randint(0, problem.valid, (N,), device="cuda")
    for program in PROGRAMS:
        T = program.temperature
        scale = None if not T else float(torch.tensor(1 / T, dtype=torch.float64).float())
        scale = torch.linspace(0.5, 2, N, device="cuda") if program is PROGRAMS[1] else scale
        usable = cuts.usable_rows(maxima, scale, program.steps)
        cut = cuts.find_cut(reference, block, scale, program.steps, maxima, usable, over)
        tokens = cuts.draw(reference, block, scale, cut, usable, SEED, keys, over).ids
        kept = z.clone()
        kept[:, : problem.valid].masked_fill_(S.left_out(z[:, : problem.valid], 0, cut), float("-inf"))
        uncut = cuda_logits.logits_forward(z, target, scale, problem)
        got = ours.rows(z, problem, scale, program.steps, None, None, uncut.clone(), SEED, keys)
        what = f"{program.transforms}:"
        assert_same_bytes(got[0], cut, f"{what} cut")
        assert_same_bytes(got[1], tokens, f"{what} tokens")
        assert_same_bytes(got[2], cuda_logits.logits_forward(kept, tokens, scale, problem), f"{what} records")
        again = cuts.find_cut(ours, block, scale, program.steps, maxima, usable, over)
        assert_same_bytes(again, cut, f"{what} cut by histograms")
        scored = ours.rows(z, problem, scale, (), cut, target, uncut.clone())
        assert_same_bytes(scored[2], cuda_logits.logits_forward(kept, target, scale, problem), f"{what} targets")
        half = problem.valid // 2 // 16 * 16
        for first, last in ((0, half), (half, problem.valid)):
            if last > first and bool(usable.all()):
                part, shard = z[:, first:last], replace(problem, vocab_start=first, valid=last - first)
                assert_same_bytes(
                    ours.draw(part, shard, scale, cut, 5, keys), reference.draw(part, shard, scale, cut, 5, keys), what
                )
    for n in (1, 20, 100):
        assert_same_bytes(ours.best(z, problem, n), reference.best(z, problem, n), f"best {n}")
    place = reference.best(z, problem, min(5, problem.valid))[:, -1].contiguous()
    assert_same_bytes(ours.before(z, problem, place), reference.before(z, problem, place), "before")


@pytest.mark.parametrize("rows, columns, kind", [
    (1, 151936, "plain"), (20, 151936, "plain"), (20, 151936, "ties"), (9, 50260, "hard"), (33, 8004, "shift"),
    (5, 40000, "sorted"), (5, 100, "mask"),
])  # fmt: skip
def test_streamed_rows_are_those_of_a_cluster(kernels, monkeypatch, rows: int, columns: int, kind: str) -> None:
    """Several grids over all multiprocessors against one cluster a row, where candidates are few, many, and all."""
    from vocabshard.kernels import cuda_logits, sm90_sampling

    z = logits_of(columns, kind)
    z = z.repeat(-(-rows // N), 1)[:rows] + 0.0
    problem = replace(PROBLEM, valid=columns - 1)
    target = torch.randint(0, problem.valid, (rows,), device="cuda")
    keys = torch.arange(rows, device="cuda")
    scale = torch.linspace(0.5, 2, rows, device="cuda")
    room = sm90_sampling.STREAM_BYTES
    for program in [*PROGRAMS, SamplingProgram((("top_k", 100), ("top_p", 0.9), ("top_p", 0.8), ("min_p", 0.05)))]:
        uncut = cuda_logits.logits_forward(z, target, scale, problem)
        got = []
        for given in (room, 0):
            monkeypatch.setattr(sm90_sampling, "STREAM_BYTES", given)
            drawn = kernels[1].rows(z, problem, scale, program.steps, None, target, uncut.clone(), SEED, keys)
            scored = kernels[1].rows(z, problem, scale, program.steps, None, target, uncut.clone())
            got.append([*drawn, *scored])
        for ours, theirs in zip(*got, strict=True):
            assert_same_bytes(ours, theirs, f"{program.transforms}")


@pytest.mark.parametrize(
    "rows, depth, columns, dtype",
    [
        (130, 64, 4099, torch.bfloat16), (300, 2048, 50257, torch.float16), (5, 100, 1003, torch.bfloat16),
        (33, 24, 999, torch.float32), (64, 512, 3000, torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cap", [None, 20.0])
def test_a_cut_in_the_fused_forward(rows: int, depth: int, columns: int, dtype: torch.dtype, cap: float | None) -> None:
    from vocabshard.kernels import cuda_logits, sm90

    g = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(rows, depth, generator=g, device="cuda").to(dtype)
    weight = (torch.randn(columns, depth, generator=g, device="cuda") / depth**0.5 * 3).to(dtype)
    target = torch.randint(0, columns, (rows,), generator=g, device="cuda")
    scale = None if cap is None else torch.linspace(0.5, 2, rows, device="cuda")
    problem = LocalProblem(vocab_start=0, valid=columns - 5, softcap=cap, entropy=False)
    _, z = sm90.forward(hidden, weight, None, target, scale, problem, want_logits=True)
    last = z[:, : columns - 5].topk(700, dim=1).values[:, -1]
    cut = S.place_of(last, torch.randint(0, columns, (rows,), generator=g, device="cuda"))
    cut[0] = S.KEEP_ALL
    records, beside = sm90.forward(hidden, weight, None, target, scale, problem, want_logits=True, cut=cut)
    kept = z.masked_fill(S.left_out(z, 0, cut), float("-inf"))
    want = cuda_logits.logits_forward(kept, target, scale, replace(problem, softcap=None))
    assert_same_bytes(records, want, "records")
    assert_same_bytes(beside, z, "logits beside a cut")


@pytest.mark.parametrize("program", PROGRAMS[:2] + PROGRAMS[8:10], ids=lambda p: str(p.transforms))
def test_a_draw_is_replayed_to_the_byte(program: SamplingProgram) -> None:
    g = torch.Generator(device="cuda").manual_seed(1)
    hidden = torch.randn(70, 256, generator=g, device="cuda").bfloat16()
    weight = (torch.randn(8003, 256, generator=g, device="cuda") / 5).bfloat16()
    drawn = vs.vocab_parallel_sample(hidden, weight, program=program, seed=3)
    again = vs.linear_logp(hidden, weight, drawn.token, sampling=program, cut=drawn.cut)
    found = vs.linear_logp(hidden, weight, drawn.token, sampling=program)
    assert_same_bytes(again, drawn.logp, "with the cut")
    assert_same_bytes(found, drawn.logp, "with the cut found again")
    keys = torch.arange(70, device="cuda")
    for row in (0, 33, 69):
        alone = vs.vocab_parallel_sample(
            hidden[row : row + 1], weight, program=program, seed=3, row_keys=keys[row : row + 1]
        )
        assert (alone.token[0], alone.cut[0]) == (drawn.token[row], drawn.cut[row])
        assert_same_bytes(alone.logp, drawn.logp[row : row + 1], f"row {row} alone")
    graph = torch.cuda.CUDAGraph()
    vs.vocab_parallel_sample(hidden, weight, program=program, seed=3, row_keys=keys)
    with torch.cuda.graph(graph):
        captured = vs.vocab_parallel_sample(hidden, weight, program=program, seed=3, row_keys=keys)
    graph.replay()
    assert_same_bytes(captured.token, drawn.token, "tokens in a graph")
    assert_same_bytes(captured.logp, drawn.logp, "log-probs in a graph")
