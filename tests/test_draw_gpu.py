"""Tokens drawn beside the Hopper forward: those of its logits, with the log-probs that they have without a draw."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import cuts, sampled
from vocabshard import sampling as S
from vocabshard.cuts import Block, Over
from vocabshard.dist.fold import fold
from vocabshard.kernels.problem import DrawnRows, LocalProblem
from vocabshard.passes import Call, LinearOperands
from vocabshard.sampling import SamplingProgram
from vocabshard.testing.compare import assert_same_bytes

pytestmark = pytest.mark.needs("sm90")

BF16, F16 = torch.bfloat16, torch.float16
SEEDS = (0, 1234567890123, -1, -(2**63), 2**63 - 1)
WARM = SamplingProgram.of(temperature=0.7)


def operands(n: int, d: int, v: int, dtype: torch.dtype, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator(device="cuda").manual_seed(n * v + d)
    hidden = torch.randn(n, d, generator=g, device="cuda").to(dtype)
    return hidden, (torch.randn(v, d, generator=g, device="cuda") * spread / d**0.5).to(dtype)


def from_logits(x: tuple, problem: LocalProblem, seed: int, keys: Tensor, real: int) -> DrawnRows:
    """By torch operations over logits, and the fold of an ordinary forward."""
    from vocabshard.kernels import cuda_logits, sampling_torch, sm90

    hidden, weight, bias, scale = x
    n = hidden.shape[0]
    reference = sampling_torch.functions(cuda_logits)
    _, z = sm90.forward(hidden, weight, bias, keys, scale, problem, want_logits=True)
    over, blocks = Over(None), [Block(z, problem)]
    usable = cuts.usable_rows(cuts.find_maxima(reference, blocks, over), scale, ())
    cut = torch.full((n,), S.KEEP_ALL, device="cuda")
    tokens = cuts.draw(reference, blocks, scale, cut, usable, seed, keys, over).ids
    records, _ = sm90.forward(hidden, weight, bias, tokens, scale, problem)
    rows = fold("sm90", records[None], tokens, -100, real, "nan")
    return DrawnRows(tokens, cut, rows.logp, rows.lse)


def check(x: tuple, problem: LocalProblem, seed: int, keys: Tensor, what: str) -> DrawnRows:
    from vocabshard.kernels import sm90

    real = problem.vocab_start + problem.valid
    got = sm90.draw_rows(*x, problem, seed, keys, -100, real, "nan")
    assert got is not None
    want = from_logits(x, problem, seed, keys, real)
    for name in DrawnRows._fields:
        assert_same_bytes(getattr(got, name), getattr(want, name), f"{what}: {name}")
    return got


@pytest.mark.parametrize(
    "n, d, v, padding, dtype, cap",
    [
        (1, 64, 1000, 0, BF16, None), (3, 512, 50257, 0, BF16, None), (8, 1024, 50304, 47, BF16, None),
        (9, 64, 17, 3, BF16, None), (16, 200, 4099, 5, F16, 5.0), (33, 256, 8192, 100, BF16, None),
        (64, 512, 151936, 267, BF16, None), (64, 72, 40000, 9000, F16, 30.0), (64, 64, 1, 0, BF16, None),
    ],
)  # fmt: skip
def test_the_tokens_of_the_logits(n: int, d: int, v: int, padding: int, dtype: torch.dtype, cap: float | None) -> None:
    hidden, weight = operands(n, d, v, dtype)
    if padding:
        weight[-padding:] = float("nan")  # excluded, whatever it holds
    bias = torch.randn(v, device="cuda") if cap else None
    problem = LocalProblem(0, v - padding, cap, False)
    keys = torch.arange(n, device="cuda") * 7919 - 3
    per_row = torch.linspace(0.4, 3, n, device="cuda")
    for seed, scale in zip(SEEDS, (None, 1.25, per_row, 0.01, 20.0), strict=True):
        check((hidden, weight, bias, scale), problem, seed, keys, f"seed {seed}, {scale}")


def test_many_draws_of_equal_columns() -> None:
    hidden, weight = torch.zeros(64, 64, device="cuda", dtype=BF16), torch.zeros(3000, 64, device="cuda", dtype=BF16)
    problem, seen = LocalProblem(0, 3000, None, False), []
    for seed in range(20):
        keys = torch.arange(64, device="cuda") + 64 * seed
        seen.append(check((hidden, weight, None, None), problem, 5, keys, f"keys from {64 * seed}").tokens)
    assert torch.cat(seen).unique().numel() > 1000  # of 1280


@pytest.mark.parametrize("scale", [None, 1.5])
def test_hard_rows(scale: float | None) -> None:
    hidden, weight = operands(12, 64, 3000, BF16)
    hidden[0], hidden[1, 3], hidden[2, 5] = 0, float("nan"), float("inf")
    hidden[3] *= 1000
    hidden[4, :2] = torch.tensor([3e38, 3e38])  # both infinities
    problem, keys = LocalProblem(0, 2990, None, False), torch.arange(12, device="cuda")
    bias = torch.zeros(3000, device="cuda")
    hard = (
        0.0, float("-inf"), -3e38, -1e7, -1048500.0, 1048570.0, 1048577.0, float("inf"), float("nan"),
    )  # fmt: skip
    for base in hard:
        bias[:] = base
        check((hidden, weight, bias, scale), problem, 3, keys, f"bias {base}")
        bias[::3], bias[1::5] = float("-inf"), -3e38
        check((hidden, weight, bias, scale), problem, 3, keys, f"bias {base} in places")
    one = torch.full((3000,), float("-inf"), device="cuda")
    one[1717] = -5.0
    assert set(check((hidden, weight, one, scale), problem, 3, keys, "one column").tokens.tolist()) <= {1717, -1}


@pytest.mark.parametrize("ranks", range(1, 9))
def test_any_number_of_shards(ranks: int) -> None:
    from vocabshard.kernels import sm90

    hidden, weight = operands(37, 128, 5000, BF16)
    bias, keys = torch.randn(5000, device="cuda"), torch.arange(37, device="cuda") - 20
    hidden[5, 1] = float("nan")
    bias[1000:1200] = float("-inf")
    whole = sm90.draw_rows(hidden, weight, bias, 1.3, LocalProblem(0, 4321, None, False), 11, keys, -100, 4321, "nan")
    assert whole is not None
    step = -(-5000 // ranks // 16) * 16
    for from_z in (False, True):
        records = []
        for first in range(0, 5000, step):
            last = min(first + step, 5000)
            problem = LocalProblem(first, max(0, min(4321, last) - first), None, False)
            x = (hidden, weight[first:last], bias[first:last], 1.3)
            if from_z:
                call = Call(sm90, "sm90", problem, None, -100, 4321, "nan", sampling=WARM)
                of_rank = sampled._records_of_draw(call, LinearOperands(*x[:3], keys, 1.3), sampled.Draw(11, keys))
            else:
                of_rank = sm90.draw_records(*x, problem, 11, keys)
            assert of_rank is not None
            records.append(of_rank)
        got = sm90.fold_draws(torch.stack(records), -100, 4321, "nan")
        for name in DrawnRows._fields:
            assert_same_bytes(getattr(got, name), getattr(whole, name), f"{name}, by logits: {from_z}")


def test_the_public_call(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = operands(64, 256, 20011, BF16)
    for program in (SamplingProgram(), WARM):
        options = {"program": program, "real_vocab_size": 20000, "return_lse": True}
        drawn = [vs.vocab_parallel_sample(hidden, weight, seed=seed, **options) for seed in (1, 2, 1)]
        assert_same_bytes(drawn[0].token, drawn[2].token)
        assert (drawn[0].token != drawn[1].token).any()
        logp = vs.linear_logp(hidden, weight, drawn[0].token, sampling=program, real_vocab_size=20000)
        assert_same_bytes(logp, drawn[0].logp)
        keys = torch.arange(64, device="cuda")
        with monkeypatch.context() as patch:
            patch.setattr("vocabshard.sample.draw_at_once", lambda *given: None)
            apart = vs.vocab_parallel_sample(hidden, weight, seed=1, row_keys=keys, **options)
        for name in ("token", "cut", "logp", "lse"):
            assert_same_bytes(getattr(apart, name), getattr(drawn[0], name), name)
        for row in (0, 17, 63):
            alone = vs.vocab_parallel_sample(hidden[row], weight, seed=1, row_keys=keys[row], **options)
            assert alone.token == drawn[0].token[row] and alone.logp == drawn[0].logp[row]
        by_row = torch.full((64,), program.temperature or 1.0, device="cuda")
        same = vs.vocab_parallel_sample(
            hidden, weight, seed=1, temperature=by_row, **{**options, "program": SamplingProgram()}
        )
        assert_same_bytes(same.logp, drawn[0].logp, "a temperature a row")
        askew = torch.zeros(20011, 257, dtype=BF16, device="cuda")[:, 1:].copy_(weight)  # not for the copy engine
        got = vs.vocab_parallel_sample(hidden, askew, seed=1, **options)
        assert_same_bytes(got.token, drawn[0].token, "strides")


PROGRAMS = [
    SamplingProgram.of(0.8, top_p=0.9), SamplingProgram.of(top_k=20), SamplingProgram.of(0.7, 0.01, 50, 0.9), WARM,
    SamplingProgram.of(temperature=0), SamplingProgram.of(0.8, top_p=0.9, top_k=5000), SamplingProgram(),
]  # fmt: skip


@pytest.mark.parametrize("n, v, dtype", [(1, 5003, BF16), (9, 50304, F16), (70, 1001, BF16), (5, 301, torch.float32)])
def test_whole_calls_under_a_program(n: int, v: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call of the kernels' bindings, and step by step."""
    hidden, weight = operands(n, 96, v, dtype)
    bias, by_row = torch.randn(v, device="cuda"), torch.linspace(0.5, 2, n, device="cuda")
    hidden[n - 1] = hidden[n - 1] * (1 if n == 1 else float("nan"))
    for program in PROGRAMS:
        own = program.temperature is not None
        options = {"program": program, "seed": 9, "real_vocab_size": v - 2, "temperature": None if own else by_row,
                   "softcap": 20.0, "return_lse": True}  # fmt: skip
        got = [vs.vocab_parallel_sample(hidden, weight, bias, **options) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr("vocabshard.sample.draw_at_once", lambda *given: None)
            want = vs.vocab_parallel_sample(hidden, weight, bias, **options)
        for name in ("token", "cut", "logp", "lse"):
            for time, out in enumerate(got):
                assert_same_bytes(getattr(out, name), getattr(want, name), f"{program.transforms}, {time}: {name}")


def rows_that_are(v: int) -> Tensor:
    """Logits of bf16 [12, V]: what lists of candidates have room for, and what they have not."""
    g = torch.Generator(device="cuda").manual_seed(v)
    z = torch.randn(12, v, generator=g, device="cuda")
    z[1] *= 2.5  # flat: a fifth of the columns has 95% of the mass
    z[2] *= 5  # peaked: few have
    z[3, v // 3] += 40  # one has
    z[4] = (2 * z[4]).round() / 2  # ties
    z[5] = 0.0  # nothing else
    z[6] = z[6].sort().values  # ascending
    z[7, 1000:1100] += 15  # the best stand together
    z[8, :: v // 300] += 11  # 300 of many groups
    z[9, 64 : 64 + 9000] = 7.0  # more equals than are listed
    z[10] *= 60
    z[11] = z[2]  # of a row of hidden that is not finite
    return z.bfloat16()


SHAPES = [
    (12, 50304, 7),
    (1, 151936, 0),
    (12, 151936, 0),
    (60, 40000, 64),
    (100, 50304, 5),
    (70, 20032, 64),
    (12, 700, 3),
]


@pytest.mark.parametrize("n, v, padding", SHAPES)
def test_whole_calls_of_any_rows(n: int, v: int, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the maxima that a forward leaves, from logits that came without, and by clusters that hold whole rows."""
    from vocabshard.kernels import sm90_sampling

    z = rows_that_are(v)
    hidden = torch.eye(12, 64, device="cuda").bfloat16().repeat(-(-n // 12), 1)[:n]
    hidden[11::12] = float("nan")  # finite weights: other rows stay what they are
    usable = torch.arange(n, device="cuda") % 12 != 11
    weight = torch.zeros(v, 64, dtype=BF16, device="cuda")
    weight[:, :12] = z.T
    for program in [
        *(SamplingProgram.of(temperature=t, top_k=k) for t, k in ((1.0, 1), (0.8, 20), (2.0, 100), (1.0, 256))),
        *(SamplingProgram.of(temperature=t, top_p=p) for t, p in ((1.0, 0.95), (0.8, 0.3), (1.5, 0.999), (1.0, 1e-6))),
        SamplingProgram.of(0.8, 0.01, 50, 0.95), SamplingProgram((("top_k", 200), ("top_p", 0.8), ("min_p", 0.05))),
    ]:  # fmt: skip
        options = {"program": program, "seed": 3, "real_vocab_size": v - padding, "return_lse": True}
        got = [vs.vocab_parallel_sample(hidden, weight, **options) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr("vocabshard.sample.draw_at_once", lambda *given: None)
            got.append(vs.vocab_parallel_sample(hidden, weight, **options))
            patch.setattr(sm90_sampling, "STREAM_BYTES", 0)
            want = vs.vocab_parallel_sample(hidden, weight, **options)
        assert torch.equal(want.token >= 0, usable)
        for name in ("token", "cut", "logp", "lse"):
            for way, out in enumerate(got):
                assert_same_bytes(getattr(out, name), getattr(want, name), f"{program.transforms}, {way}: {name}")


def test_what_is_not_drawn_so() -> None:
    from vocabshard.kernels import sm90

    hidden, weight = operands(65, 64, 100, BF16)
    problem, rest = LocalProblem(0, 100, None, False), (1, None, -100, 100, "nan")
    assert sm90.draw_rows(hidden, weight, None, None, problem, *rest) is None
    assert sm90.draw_rows(hidden[:5].float(), weight.float(), None, None, problem, *rest) is None
    assert sm90.draw_rows(hidden[:5], weight, None, None, replace(problem, vocab_start=2), *rest) is None
    assert sm90.draw_rows(hidden[:5], weight, None, None, problem, *rest) is not None
