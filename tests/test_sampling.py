"""Sampling programs: cuts, draws and log-probs against a specification by sorting, by bytes, at any W and batch."""

from __future__ import annotations

import itertools
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from vocabshard import (
    _C,
    LogprobContract,
    SamplingProgram,
    cuts,
    linear_logp,
    provenance,
    vocab_parallel_logp,
    vocab_parallel_sample,
)
from vocabshard import sampling as S
from vocabshard.cuts import Block, Over
from vocabshard.dist.fold import fold, set_targets
from vocabshard.kernels import cpu, sampling_torch, truncated
from vocabshard.kernels.problem import LocalProblem
from vocabshard.logprob_contract import ContractError
from vocabshard.options import LogpOutput
from vocabshard.testing import sampling_specification as spec
from vocabshard.testing.compare import assert_same_bytes

INF, NAN = float("inf"), float("nan")
KERNELS = {"cpu": sampling_torch.functions(cpu), "torch": sampling_torch.functions(sampling_torch)}
OF = SamplingProgram.of
PROGRAMS = [
    OF(top_k=1),
    OF(top_k=7),
    OF(top_p=0.5),
    OF(top_p=0.99),
    OF(min_p=0.1),
    OF(temperature=0.0),
    OF(temperature=0.7, min_p=0.02, top_k=40, top_p=0.9),
    SamplingProgram((("top_p", 0.8), ("temperature", 1.5), ("top_p", 0.7), ("top_k", 5))),
]


def hard_logits(V: int = 203) -> Tensor:
    """Rows with ties, both zeros, infinities, NaN, few columns, large offsets."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(24, V, generator=g) * 3
    z[1] = z[1].round()  # many equals
    z[2] = 0.0
    z[2, ::3] = -0.0
    z[3], z[3, 5], z[3, V - 1] = -INF, 1.0, 1.0
    z[4], z[5, 7], z[6, 9] = -INF, NAN, INF
    z[7] = -30.0
    z[7, [1, 8, 60]] = 2.0
    z[8] += 1e4
    z[9] -= 1e5
    z[10] = torch.randint(0, 3, (V,), generator=g).float() * 1e-3
    z[11, 16:] = -INF
    z[12, 0] = 100.0
    z[13] *= 1e-40
    z[14] = 2e6
    z[15] = torch.linspace(-5, 5, V)
    z[16] = z[16].bfloat16().float()
    return z


def in_shards(z: Tensor, bounds: list[int]) -> list[Block]:
    return [
        Block(z[:, start:stop].contiguous(), LocalProblem(start, stop - start, None, False))
        for start, stop in pairwise(bounds)
    ]


def find(
    kernel: SimpleNamespace, blocks: list[Block], scale: float | Tensor | None, program: SamplingProgram
) -> tuple[Tensor, Tensor]:
    maxima = cuts.find_maxima(kernel, blocks, Over())
    usable = cuts.usable_rows(maxima, scale, program.steps)
    return cuts.find_cut(kernel, blocks, scale, program.steps, maxima, usable, Over()), usable


BOUNDS = {
    1: [0, 203],
    2: [0, 96, 203],
    3: [0, 16, 16, 203],
    4: [0, 16, 64, 160, 203],
    8: [0, 16, 32, 48, 64, 80, 96, 112, 203],
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: "-".join(f"{n}{v:g}" for n, v in p.transforms))
def test_cuts_are_those_of_the_specification_at_every_w(program: SamplingProgram, kernel: str) -> None:
    z = hard_logits()
    T = program.temperature
    scale = None if not T else S.struct.unpack("f", S.struct.pack("f", 1 / T))[0]
    want = torch.tensor([spec.cut_of_row(row, 1.0 if scale is None else scale, program) for row in z])
    assert (want != S.KEEP_ALL).sum() >= 18
    for W, bounds in BOUNDS.items():
        if kernel == "torch" and W != 3:  # in every W the same integers as the CPU's: below
            continue
        got, _ = find(KERNELS[kernel], in_shards(z, bounds), scale, program)
        assert torch.equal(got, want), (bounds, (got != want).nonzero()[0])


def vllm_like(z: Tensor, min_p: float, k: int, p: float) -> Tensor:
    """Kept columns as an ordinary sampler has them, fp64: bool [N, V]."""
    y = z.double()
    probability = torch.softmax(y, 1)
    y = y.masked_fill(probability < min_p * probability.amax(1, keepdim=True), -INF)
    if k:
        y = y.masked_fill(y < y.topk(min(k, y.shape[1]), 1).values[:, -1:], -INF)
    ascending, index = y.sort(1)
    drop = torch.softmax(ascending, 1).cumsum(1) <= 1 - p
    drop[:, -1] = False
    return (y > -INF) & ~torch.zeros_like(drop).scatter(1, index, drop)


@pytest.mark.parametrize("min_p, k, p", [(0.05, 0, 1.0), (0, 10, 1.0), (0, 0, 0.9), (0.01, 50, 0.8), (0, 3, 0.05)])
def test_keeps_what_an_ordinary_sampler_keeps(min_p: float, k: int, p: float) -> None:
    z = torch.randn(200, 500, generator=torch.Generator().manual_seed(1)) * 2
    program = OF(min_p=min_p, top_k=k, top_p=p)
    cut, _ = find(KERNELS["cpu"], in_shards(z, [0, 500]), None, program)
    kept = ~S.left_out(z, 0, cut)
    assert torch.equal(kept, vllm_like(z, min_p, k, p))
    assert 0 < kept.sum() < kept.numel()


def kept_of(values: list[float], **program: float) -> list[int]:
    z = torch.tensor([values])
    cut, _ = find(KERNELS["cpu"], in_shards(z, [0, len(values)]), None, OF(**program))
    return (~S.left_out(z, 0, cut))[0].nonzero()[:, 0].tolist()


def test_edge_values() -> None:
    """The table of docs/operators/sampling.md."""
    four = [math.log(x) for x in (0.125, 0.5, 0.25, 0.125)]
    every = [0, 1, 2, 3]
    assert kept_of(four, temperature=0.0) == kept_of(four, temperature=9e-6, top_k=3) == [1]
    assert OF(temperature=0.0, top_k=5, top_p=0.3) == OF(temperature=1e-9) and OF(temperature=1e-9).greedy
    assert kept_of([1.0, 2.0, 2.0], temperature=0.0) == [1], "the lowest id of equals"
    assert (
        kept_of(four, top_k=0) == kept_of(four, top_k=-1) == kept_of(four, top_k=4) == kept_of(four, top_k=99) == every
    )
    assert kept_of(four, top_k=2) == [1, 2]
    assert kept_of(four, top_k=3) == every, "equals of the k-th are kept"
    assert kept_of(four, top_p=1.0) == kept_of(four, min_p=0.0) == every
    assert OF(top_p=1.0, min_p=0.0, top_k=-1, temperature=1.0) == SamplingProgram()
    zero = [0.0, math.log(2), -INF, math.log(2)]  # masses 1, 2, 0, 2 of 5, exactly
    assert kept_of(zero, top_p=1e-9) == [1], "never nothing; the lowest id first"
    assert kept_of(zero, top_p=0.3999) == [1] and kept_of(zero, top_p=0.5) == [1, 3], "what crosses p is kept"
    flat = [0.0] * 4
    assert kept_of(flat, top_p=0.5) == [0, 1], "at exactly p the next one is left out"
    assert kept_of(flat, top_p=0.5000001) == [0, 1, 2]
    assert kept_of(four, top_k=2, top_p=0.7) == [1, 2], "top-p is of what top-k left: 2/3 < 0.7"
    assert kept_of(four, top_k=2, top_p=0.6) == [1]
    assert kept_of(four, min_p=1.0) == [1] and kept_of([1.0, 1.0, 0.0], min_p=1.0) == [0, 1]
    assert kept_of(four, min_p=0.4) == [1, 2]
    assert kept_of([-INF, -INF], top_k=1) == [0, 1] and kept_of([0.0, NAN], top_k=1) == [0, 1], "nothing is cut"
    assert kept_of([0.0, -INF, -INF], top_k=2) == [0, 1, 2], "-inf is the second; its log-prob is -inf all the same"
    assert kept_of([-0.0, 0.0, -1.0], top_k=1) == [0, 1], "the zeros are equal"


def test_order_of_the_transforms_counts() -> None:
    z = torch.tensor([[2.0, 1.5, 1.0, 0.0]])
    found = []
    for names in (("temperature", "top_p"), ("top_p", "temperature")):
        values = {"temperature": 4.0, "top_p": 0.6}
        program = SamplingProgram(tuple((name, values[name]) for name in names))
        cut, _ = find(KERNELS["cpu"], in_shards(z, [0, 4]), 0.25, program)
        found.append(int((~S.left_out(z, 0, cut)).sum()))
    assert found == [3, 2]


def test_programs() -> None:
    program = OF(temperature=0.9, min_p=0.05, top_k=20, top_p=0.95)
    assert [name for name, _ in program.transforms] == list(S.NAMES)
    assert SamplingProgram(json.loads(json.dumps(program.as_list()))) == program and hash(program) == hash(
        OF(temperature=0.9, min_p=0.05, top_k=20, top_p=0.95)
    )
    with pytest.raises(AttributeError):
        program.transforms = ()  # type: ignore[misc]
    for bad in ({"temperature": -0.1}, {"temperature": NAN}, {"temperature": INF}, {"temperature": 10**400},
                {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": NAN}, {"min_p": -0.1},
                {"min_p": 1.5}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad))):
            OF(**bad)  # type: ignore[arg-type]
    for wrong in ({"top_k": 1.5}, {"top_k": True}, {"top_p": "1"}, {"temperature": None}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            OF(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="typical"):
        SamplingProgram((("typical", 0.5),))
    with pytest.raises(ValueError, match="once"):
        SamplingProgram((("temperature", 0.5), ("temperature", 2.0)))
    with pytest.raises(TypeError):
        SamplingProgram("top_k")  # type: ignore[arg-type]
    for x in (1.0, 0.5, 0.1, 1e-30, 5e-324, 0.7071067811865476):
        assert abs(S.natural_log(x) - math.log(x)) <= 4e-16 * max(1, abs(math.log(x)))


def test_philox_known_answers() -> None:
    """Of the generator's authors."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    for counter, key, want in (
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (*pi, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ):
        assert _C.spec_philox(counter, key) == spec.philox(counter, key) == want
        words = sampling_torch.philox(tuple(torch.tensor([c]) for c in counter), key[0] | key[1] << 32)
        assert [int(w) for w in words] == want


def test_clocks_are_exponential_to_fp32_and_the_same_everywhere() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.cat(
        [torch.arange(600), torch.randint(0, 2**32, (100000,), generator=g), torch.tensor([2**30 - 1, 2**30])]
    )
    x = torch.cat([x, torch.arange(2**32 - 300, 2**32)])
    second = torch.randint(0, 2**32, x.shape, generator=g)

    def words(t: Tensor) -> Tensor:
        return (t - ((t >> 31) << 32)).to(torch.int32)

    a, b, got = words(x), words(second), torch.empty(x.shape)
    _C.spec_clock(a.data_ptr(), b.data_ptr(), x.numel(), got.data_ptr())
    assert_same_bytes(sampling_torch.clock_of(x, second), got, "torch operations")
    some = list(range(0, x.numel(), 997)) + list(range(250, 262))
    assert_same_bytes(torch.stack([spec.clock(int(x[i]), int(second[i])) for i in some]), got[some], "specification")
    early = x < 2**31
    u = torch.where(x < 256, x.double() * 2.0**32 + second.double() + 0.5, (x.double() + 0.5) * 2.0**32) * 2.0**-64
    rest = (2.0**32 - x.double() - 0.5) * 2.0**-32
    want = torch.where(early, -torch.log1p(-u), -torch.log(rest)) / math.log(2)
    assert float(((got.double() - want) / want).abs().max()) < 4e-7


def test_draws_are_those_of_the_specification_at_every_w() -> None:
    z = hard_logits(67)
    g = torch.Generator().manual_seed(3)
    keys = torch.randint(-(2**62), 2**62, (len(z),), generator=g)
    seed = -(2**40) + 12345
    for program, scale in ((OF(temperature=0.8), 1.25), (OF(top_p=0.9), None), (OF(top_k=3), None)):
        want = [spec.token(row, scale or 1.0, program, seed, int(keys[n])) for n, row in enumerate(z)]
        assert want.count(-1) == 4 and len(set(want)) > 10
        for kernel, bounds in itertools.product(KERNELS.values(), ([0, 67], [0, 16, 16, 67], [0, 16, 32, 48, 64, 67])):
            blocks = in_shards(z, bounds)
            cut, usable = find(kernel, blocks, scale, program)
            got = cuts.draw(kernel, blocks, scale, cut, usable, seed, keys, Over())
            assert got.ids.tolist() == want, (program, bounds)
            some = got.ids >= 0
            picked = z.gather(1, got.ids.clamp(min=0)[:, None])[:, 0]
            assert torch.equal(got.logits[some], picked[some])


@pytest.mark.parametrize("per_row", [False, True])
def test_kernels_of_the_cpu_give_the_integers_of_the_torch_operations(per_row: bool) -> None:
    z = hard_logits(163)
    rows = len(z)
    g = torch.Generator().manual_seed(5)
    scale = torch.rand(rows, generator=g) + 0.2 if per_row else 0.7
    ours, theirs = KERNELS["cpu"], KERNELS["torch"]
    assert ours.ran == "cpu"
    for start, valid in ((0, 163), (32, 150), (16, 0)):
        problem = LocalProblem(start, valid, None, False)
        k_max = sampling_torch.exp_k(sampling_torch.scaled(z[:, :valid], scale).amax(1) if valid else torch.zeros(rows))
        cut = S.place_of(z.sort(1, descending=True).values[:, 90], torch.randint(0, 163, (rows,), generator=g))
        cut[::3] = S.KEEP_ALL
        keys, prefix = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
        for level, mass in itertools.product(range(3), (True, False)):
            a, b = (f.histogram(z, problem, scale, k_max, cut, prefix, level, mass) for f in (ours, theirs))
            assert torch.equal(a, b), (level, mass)
            if not mass:
                prefix = (prefix << S.RADIX[level][1]) | a[0].argmax(1)
        threshold = z.nan_to_num(0, 50, -50).amax(1) * 0.7 - 2
        order = S.order_of(z[:, 40])
        given = {
            "maxima": (),
            "floor": (scale, threshold),
            "equal": (order, torch.arange(rows) % 5),
            "best": (9,),
            "before": (cut,),
        }
        good = ~torch.isnan(z).any(1)
        for name, arguments in given.items():
            a, b = (getattr(f, name)(z, problem, *arguments) for f in (ours, theirs))
            assert torch.equal(a[good], b[good]), name
        a, b = (f.draw(z, problem, scale, cut, 77, keys) for f in (ours, theirs))
        good &= sampling_torch.scaled(z, scale).amax(1) <= 2.0**20  # no distribution: the caller knows
        assert torch.equal(a[:, good], b[:, good])


def test_chi_square_over_a_million_draws() -> None:
    """Against the program's own probabilities; a biased draw fails."""
    V, draws = 12, 1 << 20
    z = torch.randn(1, V, generator=torch.Generator().manual_seed(2)) * 1.5
    program = OF(temperature=0.8, top_k=9, top_p=0.97)
    weight = z.t().contiguous()  # hidden 1: the logits are the weight
    out = linear_logp(torch.ones(V, 1), weight, torch.arange(V), sampling=program, return_lse=True)
    assert isinstance(out, LogpOutput)
    probability = out.logp.double().exp()
    kept = probability > 0
    assert 4 < int(kept.sum()) < V and abs(float(probability.sum()) - 1) < 1e-6
    cut = out.cut[:1].expand(draws).contiguous()  # type: ignore[index]
    logits = z.expand(draws, V).contiguous()
    problem = LocalProblem(0, V, None, False)
    ids = cpu.sampling_draw(logits, problem, 1.25, cut, 2026, torch.arange(draws))[1]
    counts = torch.bincount(ids, minlength=V).double()
    assert counts.sum() == draws and not counts[~kept].any()

    def chi_square(expected: Tensor) -> float:
        return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())

    freedom = int(kept.sum()) - 1
    limit = freedom + 5 * math.sqrt(2 * freedom)  # beyond it one honest run in many thousands
    assert chi_square(probability * draws) < limit
    skewed = probability * torch.where(torch.arange(V) == int(probability.argmax()), 1.01, 1.0)
    assert chi_square(skewed / skewed.sum() * draws) > limit, "the test must see a hundredth"


def test_rows_and_columns_have_noise_of_their_own() -> None:
    words = sampling_torch.random_words(torch.arange(64), 0, 9, torch.arange(64)).flatten()
    assert len(set(words.tolist())) > 4090
    mean = words.double().mean() / 2**32
    assert abs(float(mean) - 0.5) < 0.03
    a = sampling_torch.random_words(torch.arange(8), 0, 1, torch.tensor([5]))
    for other in ((0, 2, 5), (0, 1, 6), (1, 1, 5), (0, 1 + (1 << 32), 5), (0, 1, 5 + (1 << 32))):
        assert not torch.equal(
            a, sampling_torch.random_words(torch.arange(8), other[0], other[1], torch.tensor([other[2]]))
        )


def inputs(N: int, D: int, V: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(N, D, generator=g).to(dtype),
        (torch.randn(V, D, generator=g) * 2 / D**0.5).to(dtype),
        torch.randn(V, generator=g) * 0.3,
    )


FULL = OF(temperature=0.9, min_p=0.005, top_k=60, top_p=0.95)
FEW = OF(temperature=0.9, top_k=6, top_p=0.95)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_draw_is_recomputed_to_the_byte(dtype: torch.dtype) -> None:
    hidden, weight, bias = inputs(19, 24, 300, dtype)
    drawn = vocab_parallel_sample(
        hidden, weight, bias, program=FULL, seed=1, return_lse=True, return_entropy=True, strict=True
    )
    given = linear_logp(hidden, weight, drawn.token, bias, sampling=FULL, cut=drawn.cut, strict=True)
    assert isinstance(given, Tensor)
    assert_same_bytes(given, drawn.logp, "with the cut")
    found = linear_logp(hidden, weight, drawn.token, bias, sampling=FULL, return_lse=True, return_entropy=True)
    assert isinstance(found, LogpOutput) and torch.equal(found.cut, drawn.cut)  # type: ignore[arg-type]
    for a, b in zip(found[:3], (drawn.logp, drawn.lse, drawn.entropy), strict=True):
        assert a is not None and b is not None
        assert_same_bytes(a, b, "without it")
    logits = linear_logp(hidden, weight, drawn.token, bias, return_logits=True).logits  # type: ignore[union-attr]
    masked = logits.masked_fill(S.left_out(logits, 0, drawn.cut), -INF)
    again = vocab_parallel_logp(masked, drawn.token, temperature=0.9, return_entropy=True)
    assert_same_bytes(again.logp, drawn.logp, "from masked logits")
    assert_same_bytes(again.entropy, drawn.entropy, "entropy from masked logits")
    plain = linear_logp(hidden, weight, drawn.token, bias, temperature=0.9)
    assert isinstance(plain, Tensor) and not torch.equal(plain, drawn.logp), "the truncation shows"
    assert bool((plain <= drawn.logp).all()) and bool((drawn.logp <= 0).all())


@pytest.mark.parametrize("isa", range(len(_C.build_info()["cpu_usable"])))
def test_any_shards_give_the_bytes_of_one(isa: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_run", lambda: _C.CpuRun(2, isa))
    hidden, weight, bias = inputs(9, 16, 203)
    drawn = vocab_parallel_sample(hidden, weight, bias, program=FULL, seed=5)
    scale = S.struct.unpack("f", S.struct.pack("f", 1 / S.struct.unpack("f", S.struct.pack("f", 0.9))[0]))[0]
    differs = 0
    for bounds in BOUNDS.values():
        blocks, records = [], []
        for start, stop in pairwise(bounds):
            problem = LocalProblem(start, stop - start, None, False)
            mine = (hidden, weight[start:stop], bias[start:stop], drawn.token, scale, problem)
            blocks.append(Block(cpu.forward(*mine, want_logits=True)[1], problem))
            records.append(cpu.forward(*mine, cut=drawn.cut)[0])
        cut, usable = find(KERNELS["cpu"], blocks, scale, FULL)
        assert torch.equal(cut, drawn.cut)
        tokens = cuts.draw(KERNELS["cpu"], blocks, scale, cut, usable, 5, torch.arange(9), Over())
        assert torch.equal(tokens.ids, drawn.token)
        rows = fold("cpu", torch.stack(records), drawn.token, -100, 203, "nan")
        assert_same_bytes(rows.logp, drawn.logp, f"bounds {bounds}")
        ordinary = [
            b.logits.masked_fill(S.left_out(b.logits, b.problem.vocab_start, cut), -INF) * scale for b in blocks
        ]
        total = torch.stack([y.exp().sum(1) for y in ordinary]).sum(0)
        if len(bounds) == 2:
            alone = total
        differs += int((total != alone).sum())
    assert differs, "an ordinary sum must differ on these inputs"


def test_any_batch_and_block_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias = inputs(23, 16, 203)
    keys = torch.arange(23) * 1000 + 7
    options = {"program": FULL, "seed": 8, "topk": 5, "return_entropy": True}
    whole = vocab_parallel_sample(hidden, weight, bias, row_keys=keys, **options)
    other = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    for rows in (*torch.arange(23).split(1), *torch.arange(23).split(7), other):
        part = vocab_parallel_sample(hidden[rows], weight, bias, row_keys=keys[rows], **options)
        for name in ("token", "logp", "cut", "entropy", "top_ids", "top_logp", "token_rank"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name
    monkeypatch.setattr(truncated, "LOGITS_BYTES", 5 * 203 * 4)
    blocks = vocab_parallel_sample(hidden, weight, bias, row_keys=keys, **options)
    assert all(torch.equal(a, b) for a, b in zip(blocks[:3], whole[:3], strict=True))
    assert torch.equal(blocks.top_logp, whole.top_logp)
    assert not torch.equal(vocab_parallel_sample(hidden, weight, bias, program=FULL, seed=9).token, whole.token)
    one = vocab_parallel_sample(hidden[3], weight, bias, program=FULL, seed=8, row_keys=keys[3])
    assert one.token.shape == () and int(one.token) == int(whole.token[3])
    nothing = vocab_parallel_sample(hidden[:0], weight, bias, program=FULL, seed=8, topk=2)
    assert nothing.token.shape == (0,) and nothing.top_ids.shape == (0, 2)
    for program in (FULL, SamplingProgram()):
        assert vocab_parallel_sample(hidden[:0], weight, bias, program=program, seed=8).token.shape == (0,)


def masked_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, kept: Tensor, T: float, cap: float | None
):
    h, w, b = (x.detach().double().requires_grad_() for x in (hidden, weight, bias))
    z = h @ w.T + b
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    logp = torch.log_softmax((z / T).masked_fill(~kept, -INF), 1)
    return logp.gather(1, targets[:, None])[:, 0], (h, w, b)


@pytest.mark.parametrize("backend", ["cpu", "cpu by blocks", "torch"])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_gradients_flow_through_kept_columns_alone(
    backend: str, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, bias = inputs(21, 24, 160)
    if backend == "cpu by blocks":
        monkeypatch.setattr(cpu, "TAKES_CUT", ())
        monkeypatch.setattr(truncated, "LOGITS_BYTES", 4 * 4 * 160)
    drawn = vocab_parallel_sample(hidden, weight, bias, program=FEW, seed=2, softcap=cap, backend=backend.split()[0])
    kept = ~S.left_out(
        linear_logp(
            hidden, weight, drawn.token, bias, softcap=cap, return_logits=True, backend=backend.split()[0]
        ).logits,  # type: ignore[union-attr]
        0,
        drawn.cut,
    )
    targets = drawn.token.clone()
    targets[4] = int((~kept[4]).nonzero()[0])  # was not drawn
    targets[5] = -100
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    options = {"softcap": cap, "sampling": FEW, "cut": drawn.cut, "backend": backend.split()[0]}
    out = linear_logp(*leaves[:2], targets, leaves[2], return_entropy=True, **options)
    assert isinstance(out, LogpOutput)
    assert out.logp[4] == -INF and out.logp[5] == 0
    upstream = torch.randn(21, generator=torch.Generator().manual_seed(4))
    upstream[4] = 0.0
    upstream[7] = 0.0
    (out.logp[torch.arange(21) != 4] * upstream[torch.arange(21) != 4]).sum().backward()
    want, exact = masked_reference(hidden, weight, bias, targets.clamp(min=0), kept, 0.9, cap)
    counted = upstream.double().clone()
    counted[5] = 0.0
    (torch.where(counted != 0, want, 0.0) * counted).sum().backward()
    assert torch.allclose(out.logp[counted != 0].double(), want[counted != 0], atol=2e-6)
    for ours, theirs in zip(leaves, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert float((ours.grad.double() - theirs.grad).abs().max()) < 2e-6
    never = ~kept[counted != 0].any(0)
    assert bool(never.any()) and not leaves[1].grad[never].any() and not leaves[2].grad[never].any()


def test_kept_logits_and_ordered_gradients_under_a_cut() -> None:
    from vocabshard import GradOptions

    hidden, weight, bias = inputs(21, 24, 160)
    drawn = vocab_parallel_sample(hidden, weight, bias, program=FULL, seed=2)
    found = []
    for grad in (GradOptions(), GradOptions(save_logits_budget=13 * 160 * 4), GradOptions(reduce="ordered")):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        logp = linear_logp(*leaves, drawn.token, bias, sampling=FULL, cut=drawn.cut, grad_options=grad)
        logp.sum().backward()  # type: ignore[union-attr]
        found.append([leaf.grad for leaf in leaves])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert torch.allclose(found[0][0], found[2][0], atol=1e-6)


@pytest.mark.parametrize("program", [None, FULL])
def test_the_best_columns_and_the_rank(program: SamplingProgram | None) -> None:
    hidden, weight, bias = inputs(11, 8, 50)
    weight[10:14] = weight[3]
    bias[10:14] = bias[3]  # equals
    targets = torch.randint(0, 50, (11,), generator=torch.Generator().manual_seed(0))
    targets[0], targets[1] = -100, 12
    out = linear_logp(hidden, weight, targets, bias, topk=60, sampling=program, return_logits=True)
    assert isinstance(out, LogpOutput) and out.logits is not None
    for n in range(11):
        best = sorted(range(50), key=lambda v: (-float(out.logits[n, v]), v))
        assert out.top_ids[n].tolist() == best + [-1] * 10  # type: ignore[index]
        rank = best.index(int(targets[n])) + 1 if targets[n] >= 0 else 0
        assert int(out.target_rank[n]) == rank  # type: ignore[index]
    for i in (0, 7, 49):
        want = linear_logp(hidden, weight, out.top_ids[:, i], bias, sampling=program, cut=out.cut)  # type: ignore[index]
        assert isinstance(want, Tensor)
        assert_same_bytes(out.top_logp[:, i].contiguous(), want, f"column {i}")  # type: ignore[index]
    assert bool((out.top_logp[:, 50:] == -INF).all())  # type: ignore[index]
    few = linear_logp(hidden, weight, targets, bias, topk=3, sampling=program)
    assert isinstance(few, LogpOutput) and torch.equal(few.top_ids, out.top_ids[:, :3])  # type: ignore[index, arg-type]
    leaf = hidden.clone().requires_grad_()
    graded = linear_logp(leaf, weight, targets, bias, topk=3, sampling=program)
    assert torch.equal(graded.top_logp, few.top_logp) and graded.logp.requires_grad  # type: ignore[union-attr]


def test_greedy() -> None:
    hidden, weight, bias = inputs(9, 8, 50)
    greedy = OF(temperature=0)
    out = vocab_parallel_sample(hidden, weight, bias, program=greedy, seed=0)
    logits = linear_logp(hidden, weight, out.token, bias, return_logits=True).logits  # type: ignore[union-attr]
    assert torch.equal(out.token, logits.argmax(1)) and not out.logp.any()
    other = linear_logp(hidden, weight, (out.token + 1) % 50, bias, sampling=greedy)
    assert bool((other == -INF).all())  # type: ignore[union-attr]


def test_rows_without_a_distribution() -> None:
    hidden, weight, bias = inputs(4, 8, 50)
    bias[7] = -INF
    hidden[1] = NAN
    out = vocab_parallel_sample(hidden, weight, bias, program=FULL, seed=0, topk=2)
    assert out.token[1] == -1 and bool(torch.isnan(out.logp[1])) and bool((out.token[[0, 2, 3]] >= 0).all())
    assert torch.isfinite(out.logp[[0, 2, 3]]).all()
    masked = vocab_parallel_sample(hidden, weight, torch.full((50,), -INF), program=FULL, seed=0)
    assert bool((masked.token == -1).all()) and bool(torch.isnan(masked.logp).all())
    temperature = torch.tensor([0.5, 1.0, NAN, 2.0])
    rows = vocab_parallel_sample(
        hidden[[0, 0, 0, 0]], weight, bias, program=OF(top_p=0.9), temperature=temperature, seed=0, validate=False
    )
    assert rows.token[2] == -1 and bool((rows.token[[0, 1, 3]] >= 0).all())
    alone = vocab_parallel_sample(
        hidden[:1], weight, bias, program=OF(temperature=2.0, top_p=0.9), seed=0, row_keys=torch.tensor([3])
    )
    assert rows.token[3] == alone.token[0] and rows.cut[3] == alone.cut[0] and rows.logp[3] == alone.logp[0]


def test_padding_is_never_drawn() -> None:
    hidden, weight, bias = inputs(64, 8, 64)
    weight[50:], bias[50:] = NAN, INF
    out = vocab_parallel_sample(hidden, weight, bias, program=OF(temperature=5.0), seed=0, real_vocab_size=50, topk=50)
    short = vocab_parallel_sample(hidden, weight[:50], bias[:50], program=OF(temperature=5.0), seed=0, topk=50)
    assert int(out.token.max()) < 50 and len(set(out.token.tolist())) > 20
    for a, b in ((out.token, short.token), (out.logp, short.logp), (out.top_ids, short.top_ids)):
        assert torch.equal(a, b)  # type: ignore[arg-type]


def test_provenance_and_contract_have_the_program() -> None:
    hidden, weight, bias = inputs(4, 8, 50)
    tokens = torch.zeros(4, dtype=torch.int64)
    drawn = vocab_parallel_sample(hidden, weight, bias, program=FULL, seed=0)
    given = provenance(hidden, weight, tokens, bias, sampling=FULL, cut=drawn.cut)
    found = provenance(hidden, weight, tokens, bias, sampling=FULL)
    assert (given.cut, found.cut, found.sampling_kernels) == ("given", "found", "cpu")
    assert given.sampling == FULL.transforms and json.loads(json.dumps(given.as_dict()))
    assert given.fingerprint == found.fingerprint == drawn.provenance.fingerprint  # type: ignore[union-attr]
    assert found.fingerprint != provenance(hidden, weight, tokens, bias, sampling=OF(temperature=0.9)).fingerprint
    kwargs = {"weight_dtype": "fp32", "bias_dtype": "fp32", "real_vocab_size": 50}
    trainer = LogprobContract(role="trainer", sampling=FULL, **kwargs)  # type: ignore[arg-type]
    engine = LogprobContract.from_dict(
        json.loads(json.dumps(LogprobContract(role="rollout", sampling=FULL, **kwargs).as_dict()))
    )  # type: ignore[arg-type]
    trainer.check_same(engine)
    drawn = vocab_parallel_sample(hidden, weight, bias, program=FULL, seed=0, contract=engine)
    linear_logp(hidden, weight, drawn.token, bias, sampling=FULL, cut=drawn.cut, contract=trainer)
    with pytest.raises(ContractError, match="sampling"):
        linear_logp(hidden, weight, drawn.token, bias, contract=trainer)
    with pytest.raises(ContractError, match="sampling"):
        trainer.check_same(LogprobContract(role="rollout", sampling=OF(top_k=3), **kwargs))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="sampling"):
        LogprobContract(role="rollout", sampling=(("top_k", -7),), **kwargs)  # type: ignore[arg-type]


def test_constants_are_those_of_the_header() -> None:
    text = (Path(__file__).parent.parent / "csrc" / "sampling.h").read_text()

    def of(name: str) -> float:
        (found,) = re.findall(rf"\b{name} = ([-\w.+]+)", text)
        return float.fromhex(found.rstrip("f")) if "p" in found else int(found.rstrip("u"), 0)

    ours = {
        **{"kMassBits": S.MASS_BITS, "kMassSpan": S.MASS_SPAN, "kEveryTie": S.EVERY_TIE},
        **{f"kClock{i}": value for i, value in enumerate(S.CLOCK_COEFFICIENTS)},
        **dict(zip(("kPhiloxM0", "kPhiloxM1", "kPhiloxW0", "kPhiloxW1"), S.PHILOX, strict=True)),
        **{"kPhiloxRounds": S.PHILOX_ROUNDS, "kSecondBelow": S.SECOND_BELOW, "kSqrt2Single": S.SQRT2_SINGLE},
    }
    assert {name: of(name) for name in ours} == ours
    shifts, widths = (
        tuple(map(int, re.findall(r"\d+", re.findall(rf"{name}\[3\] = {{([^}}]*)}}", text)[0])))
        for name in ("kRadixShift", "kRadixBits")
    )
    assert tuple(zip(shifts, widths, strict=True)) == S.RADIX


def test_cut_parts() -> None:
    logit, tie = torch.tensor([1.5, -2.0, 0.0, -INF, -0.0]), torch.tensor([7, S.EVERY_TIE, 0, S.EVERY_TIE, 3])
    cut = S.make_cut(logit, tie)
    back = S.cut_parts(cut)
    assert torch.equal(back[0], logit) and torch.equal(back[1], tie)
    assert int(cut[3]) == S.KEEP_ALL and torch.equal(S.make_cut(*back), cut)


def test_errors() -> None:
    hidden, weight, bias = inputs(4, 8, 50)
    tokens, cut = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    nowhere = torch.tensor([S.KEEP_ALL, 0, S.NO_ARRIVAL, 0])
    for error, match, options in (
        (TypeError, "SamplingProgram", {"sampling": "top_p"}),
        (ValueError, "without the program", {"cut": cut}),
        (ValueError, "one of the two", {"sampling": FULL, "temperature": 0.5}),
        (ValueError, "shaped as target_ids", {"sampling": FULL, "cut": cut[:2]}),
        (TypeError, "cut must be int64", {"sampling": FULL, "cut": cut.float()}),
        (ValueError, r"cut\[2\] is 9223372036854775807", {"sampling": FULL, "cut": nowhere}),
        (ValueError, "topk", {"topk": 0}),
        (TypeError, "topk", {"topk": 2.5}),
    ):
        for function in (linear_logp, provenance):
            with pytest.raises(error, match=match):
                function(hidden, weight, tokens, bias, **options)  # type: ignore[arg-type]
    for error, match, options in (
        (TypeError, "seed", {"seed": 0.5}),
        (ValueError, "64 bits", {"seed": 1 << 63}),
        (ValueError, "row_keys", {"seed": 0, "row_keys": cut[:2]}),
        (TypeError, "row_keys", {"seed": 0, "row_keys": cut.int()}),
    ):
        with pytest.raises(error, match=match):
            vocab_parallel_sample(hidden, weight, bias, program=FULL, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="program"):
        vocab_parallel_sample(hidden, weight, bias, program=None, seed=0)  # type: ignore[arg-type]
    for rows in (4, 0):
        for columns, options in ((0, {}), (50, {"real_vocab_size": 0})):
            for validate in (True, False):
                with pytest.raises(ValueError, match="no token to draw: real_vocab_size is 0"):
                    empty = (hidden[:rows], weight[:columns], bias[:columns])
                    vocab_parallel_sample(*empty, program=FULL, seed=0, validate=validate, **options)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("n", [1, 3])
def test_other_targets_leave_the_records_as_they_are(backend: str, n: int) -> None:
    records = torch.arange(24).view(2, 3, 4) << 32
    before = records.clone()
    assert set_targets(backend, records, torch.randn(4, n)).shape == (2, 3, 4 * n)
    assert torch.equal(records, before)
