"""Strict mode over a group: one provenance, one fingerprint, and the same error with its field on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import vocabshard as vs
from vocabshard.launching import Ranks

V, D = 320, 16


def call(ranks: Ranks, shard: vs.VocabShard, **options) -> vs.LogpOutput:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, D, generator=g), torch.randn(V, D, generator=g)
    target = torch.randint(0, V, (5,), generator=g)
    hidden, weight, target = (x.to(ranks.device) for x in (hidden, weight, target))
    out = vs.linear_logp(hidden, weight[shard.start : shard.stop], target, shard=shard, return_lse=True, **options)
    assert isinstance(out, vs.LogpOutput)
    return out


def shard_at(ranks: Ranks, step: int) -> vs.VocabShard:
    bounds = [min(step * i, V) for i in range(ranks.world_size)] + [V]
    return vs.VocabShard(bounds[ranks.rank], bounds[ranks.rank + 1], V, V, dist.group.WORLD)


def test_one_fingerprint_on_every_rank_and_at_every_sharding(ranks: Ranks) -> None:
    found = [call(ranks, shard_at(ranks, step), strict=True).provenance for step in (32, 80)]
    alone = vs.VocabShard(0, V, V, V)
    found.append(call(ranks, alone, strict=True).provenance)
    mine = [p.fingerprint for p in found if p is not None]
    everyone: list[list[str]] = [[] for _ in range(ranks.world_size)]
    dist.all_gather_object(everyone, mine)
    assert {fingerprint for theirs in everyone for fingerprint in theirs} == {mine[0]}
    assert found[0] is not None and found[0].shard_ranges == shard_at(ranks, 32).ranges


def test_every_rank_gets_the_error_and_its_field(ranks: Ranks) -> None:
    if ranks.world_size == 1:
        pytest.skip("needs inner boundaries")
    with pytest.raises(vs.ContractError, match="not multiples of 16") as caught:
        call(ranks, shard_at(ranks, 40), strict=True, validate=True)
    assert caught.value.field == "shard_ranges"
    shard = shard_at(ranks, 32)
    contract = vs.LogprobContract(role="trainer", weight_dtype="fp32", shard_ranges=shard.ranges)
    call(ranks, shard, contract=contract, validate=True)
    one_rank = replace(contract, softcap=30.0) if ranks.rank == ranks.world_size - 1 else contract
    with pytest.raises(vs.ContractError, match=rf"rank {ranks.world_size - 1} of the group: softcap") as caught:
        call(ranks, shard, contract=one_rank, validate=True)
    assert caught.value.field == "softcap"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_has_one_fingerprint_at_every_sharding(ranks: Ranks, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=g).to(dtype).to(ranks.device)
    want = vs.weight_fingerprint(weight)
    for step in (32, 80):
        shard = shard_at(ranks, step)
        assert vs.weight_fingerprint(weight[shard.start : shard.stop], shard) == want
    padded = vs.VocabShard.split(V - 5, dist.group.WORLD, pad_to_multiple_of=96)
    mine = torch.full((padded.size, D), float("nan"), dtype=dtype, device=ranks.device)
    mine[: padded.valid] = weight[padded.start : padded.start + padded.valid]
    assert vs.weight_fingerprint(mine, padded) == vs.weight_fingerprint(weight[: V - 5])
    one_short = mine[: padded.size - (ranks.rank == 0)]
    with pytest.raises(ValueError, match=rf"rank 0 of the group.*{padded.size - 1}|{padded.size - 1}"):
        vs.weight_fingerprint(one_short, padded)


def test_ranks_with_rows_of_different_weights_have_no_fingerprint(ranks: Ranks) -> None:
    if ranks.world_size == 1:
        pytest.skip("one rank")
    shard, last = shard_at(ranks, 80), ranks.rank == ranks.world_size - 1
    weight = torch.ones(shard.size, D, device=ranks.device)
    for odd, said in ((weight.bfloat16(), "do not agree on dtype"), (weight[:, :8], "do not agree on columns")):
        with pytest.raises(ValueError, match=said):
            vs.weight_fingerprint(odd if last else weight, shard)


def test_bad_sizes_of_one_rank_are_an_error_on_every_rank(ranks: Ranks) -> None:
    last, group = ranks.rank == ranks.world_size - 1, dist.group.WORLD
    for wrong in (None, "320", -1, 320.0):
        with pytest.raises(ValueError, match="real_vocab_size must be an int of 0 or more"):
            vs.VocabShard.split(wrong if last else V, group)
    with pytest.raises(ValueError, match="pad_to_multiple_of must be an int of 1 or more, got 0"):
        vs.VocabShard.split(V, group, pad_to_multiple_of=0 if last else 64)
    for sizes in (7, ["80"] * ranks.world_size):
        with pytest.raises(ValueError, match=r"from_sizes: expected \d+ sizes"):
            vs.VocabShard.from_sizes(sizes if last else [80] * ranks.world_size, group)
