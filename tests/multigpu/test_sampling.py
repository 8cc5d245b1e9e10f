"""Tokens, cuts and log-probs of a group against those of one process: the same bytes, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import vocabshard as vs
from vocabshard import best
from vocabshard.dist import grad as dist_grad
from vocabshard.kernels import truncated
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

V, D, N = 400, 16, 13
FULL = vs.SamplingProgram.of(temperature=0.8, min_p=0.01, top_k=50, top_p=0.9)
PROGRAMS = [FULL, vs.SamplingProgram.of(temperature=0), vs.SamplingProgram.of(temperature=1.3)]


def shard_at(ranks: Ranks, step: int) -> vs.VocabShard:
    bounds = [min(step * i, V) for i in range(ranks.world_size)] + [V]
    return vs.VocabShard(bounds[ranks.rank], bounds[ranks.rank + 1], V, V, dist.group.WORLD)


def inputs(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g) * 0.4
    hidden[3] = 0  # all are equal but for the bias
    bias = torch.randint(0, 2, (V,), generator=g) * 0.25
    return tuple(x.to(ranks.device) for x in (hidden, weight, bias))  # type: ignore[return-value]


@pytest.mark.parametrize("program", PROGRAMS, ids=["full", "greedy", "temperature"])
@pytest.mark.parametrize("step", [16, 96, 400], ids=["uneven", "even", "one rank has all"])
def test_sampling_over_a_group(ranks: Ranks, program: vs.SamplingProgram, step: int, monkeypatch) -> None:
    hidden, weight, bias = inputs(ranks)
    shard = shard_at(ranks, step)
    mine = slice(shard.start, shard.stop)
    options = {"program": program, "seed": 11, "topk": 7, "return_entropy": True, "return_lse": True}
    alone = vs.vocab_parallel_sample(hidden, weight, bias, **options)
    monkeypatch.setattr(truncated, "LOGITS_BYTES", 6 * 4 * V)  # blocks of a few rows, as many on every rank
    ours = vs.vocab_parallel_sample(hidden, weight[mine], bias[mine], shard=shard, strict=True, **options)
    for name in ("logp", "lse", "entropy", "top_logp"):
        assert_same_bytes(getattr(ours, name), getattr(alone, name), name)
    for name in ("token", "cut", "top_ids", "token_rank"):
        assert torch.equal(getattr(ours, name), getattr(alone, name)), name
    assert ours.provenance is not None and alone.provenance is not None
    assert ours.provenance.fingerprint == alone.provenance.fingerprint
    for cut in (ours.cut, None):
        scored = vs.linear_logp(
            hidden, weight[mine], ours.token, bias[mine], shard=shard, sampling=program, cut=cut, return_lse=True
        )
        assert isinstance(scored, vs.LogpOutput)
        assert_same_bytes(scored.logp, ours.logp, f"replayed, cut given: {cut is not None}")
        assert scored.cut is None or torch.equal(scored.cut, ours.cut)


@pytest.mark.parametrize("step", [16, 96, 400], ids=["uneven", "even", "one rank has all"])
def test_a_draw_of_all_columns(ranks: Ranks, step: int) -> None:
    """What Hopper draws beside its forward; twice, the second time with the plan of the first."""
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    hidden, weight, bias = (x.to(dtype) for x in inputs(ranks))
    shard, keys = shard_at(ranks, step), torch.arange(N, device=ranks.device) * 3
    mine = slice(shard.start, shard.stop)
    for seed in (5, 6):
        options = {"program": PROGRAMS[2], "seed": seed, "row_keys": keys, "return_lse": True, "validate": False}
        alone = vs.vocab_parallel_sample(hidden, weight, bias, **options)
        ours = vs.vocab_parallel_sample(hidden, weight[mine], bias[mine], shard=shard, **options)
        for name in ("token", "cut", "logp", "lse"):
            assert_same_bytes(getattr(ours, name), getattr(alone, name), name)


@pytest.mark.parametrize("step", [16 * 256, 16 * 640], ids=["uneven", "narrow"])
def test_the_best_of_many_rows_over_a_group(ranks: Ranks, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns enough for what a GPU finds beside its forward."""
    monkeypatch.setattr(best, "BESIDE_FROM", 65)
    g = torch.Generator().manual_seed(1)
    columns, dtype = 20000, torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    hidden = torch.randn(70, 16, generator=g).to(ranks.device, dtype)
    weight = torch.randn(columns, 16, generator=g).round().to(ranks.device, dtype)
    target = torch.randint(0, columns, (70,), generator=g).to(ranks.device)
    hidden[3] = 0
    bounds = [min(step * i, columns) for i in range(ranks.world_size)] + [columns]
    shard = vs.VocabShard(bounds[ranks.rank], bounds[ranks.rank + 1], columns, columns, dist.group.WORLD)
    alone = vs.linear_logp(hidden, weight, target, topk=20, return_lse=True)
    ours = vs.linear_logp(hidden, weight[shard.start : shard.stop], target, shard=shard, topk=20, return_lse=True)
    for name in ("logp", "lse", "top_logp"):
        assert_same_bytes(getattr(ours, name), getattr(alone, name), name)
    for name in ("top_ids", "target_rank"):
        assert torch.equal(getattr(ours, name), getattr(alone, name)), name


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "in parts"])
def test_gradients_over_a_group(ranks: Ranks, parts: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias = inputs(ranks)
    if parts:
        monkeypatch.setattr(dist_grad, "PART_ELEMENTS", 3 * D)
    drawn = vs.vocab_parallel_sample(hidden, weight, bias, program=FULL, seed=1)
    shard = shard_at(ranks, 96)
    mine = slice(shard.start, shard.stop)
    found = []
    for w, b, options in ((weight, bias, {}), (weight[mine], bias[mine], {"shard": shard})):
        h, w = hidden.clone().requires_grad_(), w.clone().requires_grad_()
        logp = vs.linear_logp(h, w, drawn.token, b, sampling=FULL, cut=drawn.cut, backend=backend, **options)
        (logp * torch.arange(N, device=h.device)).sum().backward()
        found.append((h.grad, w.grad))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert torch.allclose(found[0][1][mine], found[1][1], atol=1e-5)


def test_sequence_parallel(ranks: Ranks) -> None:
    hidden, weight, bias = inputs(ranks)
    rows = 3 * ranks.world_size
    hidden = hidden[:1].expand(rows, D) + torch.arange(rows, device=hidden.device)[:, None] * 0.01
    drawn = vs.vocab_parallel_sample(hidden, weight, bias, program=FULL, seed=1)
    shard = shard_at(ranks, 96)
    mine, own = slice(shard.start, shard.stop), slice(3 * ranks.rank, 3 * ranks.rank + 3)
    for cut in (drawn.cut, None):
        logp = vs.linear_logp(
            hidden[own], weight[mine], drawn.token, bias[mine], shard=shard, sampling=FULL, cut=cut,
            sequence_parallel=True,
        )  # fmt: skip
        assert_same_bytes(logp, drawn.logp, "sequence parallel")


def test_a_program_or_seed_of_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    if ranks.world_size == 1:
        pytest.skip("needs two ranks")
    hidden, weight, bias = inputs(ranks)
    shard = shard_at(ranks, 96)
    mine = slice(shard.start, shard.stop)
    options = {"shard": shard, "validate": True}
    other = ranks.rank == ranks.world_size - 1
    with pytest.raises(ValueError, match="different options"):
        vs.vocab_parallel_sample(hidden, weight[mine], bias[mine], program=FULL, seed=int(other), **options)
    with pytest.raises(ValueError, match="different options"):
        vs.vocab_parallel_sample(hidden, weight[mine], bias[mine], program=PROGRAMS[other], seed=0, **options)
    keys = torch.arange(N, device=hidden.device) + int(other)
    with pytest.raises(ValueError, match="different row_keys"):
        vs.vocab_parallel_sample(hidden, weight[mine], bias[mine], program=FULL, seed=0, row_keys=keys, **options)
    tokens = torch.zeros(N, dtype=torch.int64, device=hidden.device)
    cut = torch.zeros_like(tokens) + int(other)
    with pytest.raises(ValueError, match="different cut"):
        vs.linear_logp(hidden, weight[mine], tokens, bias[mine], sampling=FULL, cut=cut, **options)
