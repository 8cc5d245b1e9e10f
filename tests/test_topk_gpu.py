"""The best columns and the target's rank on a Hopper GPU: the bytes of torch operations over all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import LogpOutput, best
from vocabshard import sampling as S
from vocabshard.kernels.problem import LocalProblem
from vocabshard.testing.compare import assert_same_bytes

pytestmark = pytest.mark.needs("sm90")
NAN, INF = float("nan"), float("inf")


def generator() -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(0)


def logits_of(rows: int, columns: int, kind: str) -> Tensor:
    ids = torch.arange(columns, device="cuda").float()
    if kind in ("ascending", "descending"):
        return (ids if kind == "ascending" else -ids).repeat(rows, 1)
    if kind == "equal":
        return torch.zeros(rows, columns, device="cuda")
    x = torch.randn(rows, columns + 3, generator=generator(), device="cuda")[:, : columns if kind != "ties" else None]
    if kind == "ties":
        x = ((x * 2).round() / 2)[:, :columns]  # rows off 16 bytes
    if kind == "odd":
        x[0], x[1, columns // 2], x[2, 0], x[3, : columns // 2] = -INF, NAN, INF, -0.0
        x[4], x[5, columns // 3 :], x[6] = NAN, NAN, INF
    return x


@pytest.mark.parametrize(
    "rows, columns, kind",
    [
        (9, 1, "plain"), (9, 17, "ties"), (9, 1000, "ties"), (9, 4099, "odd"), (1, 151936, "plain"), (9, 151936, "odd"),
        (3, 151936, "ascending"), (3, 151936, "descending"), (3, 50257, "equal"), (300, 9600, "plain"),
        (1500, 9600, "odd"), (1500, 9600, "ascending"), (64, 50257, "ties"),
    ],
)  # fmt: skip
def test_a_scan_of_logits(rows: int, columns: int, kind: str) -> None:
    from vocabshard.kernels import sampling_torch, sm90

    z, valid = logits_of(rows, columns, kind), columns - (3 if columns > 8 else 0)
    problem = LocalProblem(32, valid, None, False)
    target = torch.randint(28, columns + 36, (rows,), generator=generator(), device="cuda")
    here = (target >= 32) & (target < 32 + valid)
    own = S.place_of(z.gather(1, (target - 32).clamp(0, columns - 1)[:, None])[:, 0], target)
    want = torch.where(here, sampling_torch.sampling_before(z, problem, own), 0)
    for n in (1, 20, 128):
        found, before = sm90.topk_scan(z, problem, n, target)
        assert_same_bytes(found, sampling_torch.sampling_best(z, problem, n), f"best {n}")
        assert_same_bytes(before, want, f"before {n}")
    other = S.place_of(torch.randn(rows, generator=generator(), device="cuda"), target * 0 + 7)
    _, before = sm90.topk_scan(z, problem, 20, target, other)
    assert_same_bytes(before, sampling_torch.sampling_before(z, problem, other), "before a given place")


def both_ways(call: Callable[[], Any]) -> LogpOutput:
    """The call, with the bytes that it has by torch operations."""
    from vocabshard.kernels import sm90

    got = call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90, "topk_fits", lambda columns, n: False)
        want = call()
    for name in got._fields:
        if isinstance(getattr(got, name), Tensor):
            assert_same_bytes(getattr(got, name), getattr(want, name), name)
    return got


def inputs(rows: int, depth: int, columns: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = generator()
    hidden = torch.randn(rows, depth, generator=g, device="cuda")
    weight = torch.randn(columns, depth, generator=g, device="cuda") / depth**0.5 * 3
    bias = torch.randn(columns, generator=g, device="cuda")
    target = torch.randint(0, columns, (rows,), generator=g, device="cuda")
    target[0], target[-1], target[rows // 2] = -100, columns - 1, 0
    if kind in ("ascending", "descending"):  # lists that grow long
        ids, sign = torch.arange(columns, device="cuda"), 1.0 if kind == "ascending" else -1.0
        weight[:, 0], weight[:, 1], weight[:, 2:], bias[:] = ids // 256, ids % 256, 0, 0
        hidden[: rows // 2], hidden[: rows // 2, 0], hidden[: rows // 2, 1] = 0, 256 * sign, sign
    if kind == "ties":
        hidden, weight, bias = hidden.round(), (weight * 2).round(), bias.round()
    if kind == "odd":
        hidden[0], hidden[1], hidden[2] = 0, NAN, 0
        bias[torch.rand(columns, generator=g, device="cuda") < 0.5] = -INF
    if kind == "masked":  # fewer than are wanted, and those at the end
        bias[:] = -INF
        bias[-30:-12] = 1
    if kind == "equal":
        hidden, bias = hidden * 0, bias * 0
    return hidden.bfloat16(), weight.bfloat16(), bias, target


@pytest.mark.parametrize(
    "rows, depth, columns, kind",
    [
        (1, 64, 5003, "plain"), (64, 512, 20011, "ties"), (65, 64, 4000, "plain"), (130, 512, 20011, "plain"),
        (257, 64, 9001, "ties"), (300, 64, 50257, "odd"), (300, 64, 50257, "masked"), (300, 64, 50257, "equal"),
        (600, 64, 50257, "ascending"), (130, 64, 50257, "descending"), (4200, 64, 20000, "ties"),
    ],
)  # fmt: skip
def test_a_call(rows: int, depth: int, columns: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best, "BESIDE_FROM", 65)  # one block of rows, and clusters that share rows, too
    hidden, weight, bias, target = inputs(rows, depth, columns, kind)
    scale = torch.rand(rows, generator=generator(), device="cuda") + 0.5
    for n in (1, 20, 100):
        both_ways(
            lambda n=n: vs.linear_logp(hidden, weight, target, bias, topk=n, return_lse=True)  # type: ignore[misc]
        )
    both_ways(lambda: vs.linear_logp(hidden, weight, target, topk=20, temperature=scale, softcap=10.0))
    both_ways(
        lambda: vs.linear_logp(
            hidden.half(), weight.half(), target, bias.half(), topk=20, real_vocab_size=columns - 5, temperature=0.7
        )
    )


def test_programs_and_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best, "BESIDE_FROM", 65)
    program = vs.SamplingProgram.of(temperature=0.9, min_p=0.005, top_k=60, top_p=0.95)
    hidden, weight, bias, target = inputs(200, 128, 30000, "plain")
    for rows in (8, 200):
        h = hidden[:rows]
        drawn = vs.vocab_parallel_sample(h, weight, bias, program=program, seed=5)
        both_ways(lambda h=h: vs.vocab_parallel_sample(h, weight, bias, program=program, seed=5, topk=20))  # type: ignore[misc]
        both_ways(lambda h=h: vs.linear_logp(h, weight, target[: len(h)], bias, sampling=program, topk=20))  # type: ignore[misc]
        out = both_ways(
            lambda h=h, d=drawn: vs.linear_logp(h, weight, d.token, bias, sampling=program, cut=d.cut, topk=20)  # type: ignore[misc]
        )
        assert_same_bytes(out.logp, drawn.logp)


def test_a_row_alone_and_operands_off_16_bytes() -> None:
    hidden, weight, bias, target = inputs(300, 256, 20000, "plain")
    whole = both_ways(lambda: vs.linear_logp(hidden, weight, target, bias, topk=20))
    for row in (1, 299):
        one = slice(row, row + 1)
        alone = vs.linear_logp(hidden[one], weight, target[one], bias, topk=20)
        for name in ("logp", "top_ids", "top_logp", "target_rank"):
            assert_same_bytes(getattr(alone, name), getattr(whole, name)[one], name)
    odd_hidden, odd_weight = torch.cat([hidden[:, :3], hidden], 1)[:, 3:], torch.empty(20000 * 256 + 1).bfloat16()
    odd_weight = odd_weight.cuda()[1:].view(20000, 256).copy_(weight)
    for h, w in ((odd_hidden, weight), (hidden, odd_weight)):
        out = vs.linear_logp(h, w, target, bias, topk=20)
        for name in ("logp", "top_ids", "top_logp", "target_rank"):
            assert_same_bytes(getattr(out, name), getattr(whole, name), name)


@pytest.mark.parametrize("rows", [65, 130, 300, 600])
def test_a_target_of_minus_infinity_at_any_rank(rows: int) -> None:
    from vocabshard.kernels import sampling_torch, sm90

    hidden, weight, bias, target = inputs(rows, 64, 20011, "odd")
    problem = LocalProblem(100, 20011, None, False)
    _, z = sm90.forward(hidden, weight, bias, target, None, problem, want_logits=True)
    assert z is not None
    operands = sm90.TopkOperands(hidden, weight, bias, target, None, problem, None)
    for first in (3, 1000, 9000, 30000):  # of ranks before and after, of the leading columns, and of the others
        place = S.place_of(torch.full((rows,), -INF, device="cuda"), first + torch.arange(rows, device="cuda"))
        _, _, before = sm90.topk_forward(operands, 20, place)
        assert_same_bytes(before, sampling_torch.sampling_before(z, problem, place), f"before a target from {first} on")
