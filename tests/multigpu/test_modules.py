"""The modules over groups of 1 to 4 ranks: values, outputs and checkpoints that do not know the number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import vocabshard as vs
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

D, V = 24, 1001


@pytest.fixture(scope="module")
def groups() -> dict[int, dist.ProcessGroup]:
    """Groups of the last 1, 2, 3 and 4 ranks: not all begin at the world's rank 0."""
    world = dist.get_world_size()
    return {size: dist.new_group(list(range(world - size, world))) for size in range(1, world + 1)}


def make(group, device, seed: int = 7, **options) -> vs.VocabParallelLMHead:
    mine = 0 if group is None else dist.get_rank(group)
    torch.manual_seed(seed + 100 * mine)  # the values are those of the rank 0 of the group
    return vs.VocabParallelLMHead(D, V, group, device=device, **options)


def members(ranks: Ranks, groups):
    """(W, group) of the groups that this rank is in."""
    return [(size, group) for size, group in groups.items() if ranks.rank >= ranks.world_size - size]


def own(module, full: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a whole matrix, with zeros in the padding."""
    shard = module.shard
    padded = torch.cat([full[:V], full.new_zeros(shard.padded_vocab_size - V, *full.shape[1:])])
    return padded[shard.start : shard.stop]


def test_initial_values_do_not_depend_on_the_number_of_ranks(ranks: Ranks, groups) -> None:
    for size, group in members(ranks, groups):
        head = make(group, ranks.device)
        full = make(None, ranks.device).weight if head.shard.rank == 0 else torch.empty(1024, D, device=ranks.device)
        dist.broadcast(full.data, dist.get_global_rank(group, 0), group=group)
        assert_same_bytes(head.weight, own(head, full), f"W = {size}")


def test_whole_and_own_weights_load(ranks: Ranks, groups) -> None:
    full = torch.randn(V, D, generator=torch.Generator().manual_seed(3)).to(ranks.device)
    hidden = torch.randn(9, D, generator=torch.Generator().manual_seed(4)).to(ranks.device)
    target_ids = torch.arange(9, device=ranks.device) * 111
    want = vs.linear_logp(hidden, full, target_ids)
    for size, group in members(ranks, groups):
        for padded in (V, 1152):
            head = make(group, ranks.device)
            head.load_state_dict({"weight": torch.cat([full, full.new_ones(padded - V, D)])})
            assert_same_bytes(head.weight, own(head, full), f"W = {size}, {padded} rows")
        again = make(group, ranks.device, seed=8)
        again.load_state_dict(head.state_dict())
        assert_same_bytes(again.weight, head.weight)
        assert_same_bytes(again(hidden, target_ids), want, f"W = {size}")
        if size > 1:
            with pytest.raises(RuntimeError, match="what was saved at another number of ranks is loaded through"):
                head.load_state_dict({"weight": head.weight[1:]})


@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
def test_a_checkpoint_of_any_number_loads_at_any(ranks: Ranks, groups, tmp_path_factory, saved_by: int) -> None:
    if saved_by not in groups:
        pytest.skip(f"{ranks.world_size} ranks")
    paths = [str(tmp_path_factory.mktemp("checkpoint"))]
    dist.broadcast_object_list(paths)
    full = torch.randn(V, D, generator=torch.Generator().manual_seed(5)).to(ranks.device)
    if ranks.rank >= ranks.world_size - saved_by:
        head = make(groups[saved_by], ranks.device, bias=True)
        head.load_state_dict({"weight": full, "bias": full[:, 0]})
        dcp.save(head.sharded_state_dict("lm_head."), checkpoint_id=paths[0], process_group=groups[saved_by])
    dist.barrier()
    for size, group in members(ranks, groups):
        other = make(group, ranks.device, bias=True, pad_to_multiple_of=80)
        state = other.sharded_state_dict("lm_head.")
        assert state["lm_head.weight"].shape == (V, D)
        dcp.load(state, checkpoint_id=paths[0], process_group=group)
        assert_same_bytes(other.weight, own(other, full), f"{saved_by} to {size}")
        assert_same_bytes(other.bias, own(other, full[:, 0]), f"{saved_by} to {size}, bias")


def test_tied_embedding_trains_as_on_one_rank(ranks: Ranks, groups) -> None:
    """Embeddings are the same bytes on every rank and for every W; gradients and padding rank by rank."""
    ids = torch.randint(0, V, (6, 7), generator=torch.Generator().manual_seed(6)).to(ranks.device)
    target_ids = ids.roll(1)
    full = torch.randn(V, D, generator=torch.Generator().manual_seed(5)).to(ranks.device)
    full[3] = -0.0
    full[4, 1] = torch.nan
    ids[0, :2] = torch.tensor([3, 4])

    def run(group):
        embedding = vs.VocabParallelEmbedding(V, D, group, device=ranks.device)
        head = vs.VocabParallelLMHead(D, V, group, weight=embedding.weight, device=ranks.device)
        embedding.load_state_dict({"weight": full})
        embedded = embedding(ids)
        with torch.no_grad():
            embedding.weight.nan_to_num_()
        for _ in range(2):
            embedding.weight.grad = None
            (-head(embedding(ids).tanh(), target_ids)).mean().backward()
            with torch.no_grad():
                embedding.weight -= 0.5 * embedding.weight.grad
        return embedding, embedded.detach()

    alone, want = run(None)
    assert_same_bytes(want, full[ids])
    for size, group in members(ranks, groups):
        embedding, embedded = run(group)
        assert_same_bytes(embedded, want, f"W = {size}")
        shard = embedding.shard
        assert embedding.weight[shard.valid :].count_nonzero() == 0
        assert (embedding.weight - own(embedding, alone.weight.detach())).abs().max() < 1e-5, f"W = {size}"
        assert (embedding.weight.grad - own(embedding, alone.weight.grad)).abs().max() < 1e-6, f"W = {size}"


@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 3), (torch.bfloat16, 4), (torch.float16, 1)])
def test_embeddings_of_odd_widths(ranks: Ranks, dtype: torch.dtype, width: int) -> None:
    """Rows that are no whole number of 32-bit words; ids of the last real row."""
    torch.manual_seed(0)
    embedding = vs.VocabParallelEmbedding(37, width, dist.group.WORLD, dtype=dtype, device=ranks.device)
    ids = torch.tensor([36, 0, 16, 15, 36], device=ranks.device)
    gathered = [torch.empty_like(embedding.weight) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, embedding.weight.data)
    assert_same_bytes(embedding(ids), torch.cat(gathered)[ids])


def test_a_tied_weight_of_other_padding_is_refused(ranks: Ranks) -> None:
    embedding = vs.VocabParallelEmbedding(V, D, dist.group.WORLD, pad_to_multiple_of=1, device=ranks.device)
    if ranks.world_size == 1:
        pytest.skip("one rank")
    with pytest.raises(ValueError, match="give both modules the same sizes, group and pad_to_multiple_of"):
        vs.VocabParallelLMHead(D, V, dist.group.WORLD, weight=embedding.weight, pad_to_multiple_of=2048)


def test_vocabularies_smaller_than_a_tile(ranks: Ranks, groups, tmp_path_factory) -> None:
    """All but the first rank hold padding alone: scores, embeddings, training and checkpoints as on one rank."""
    paths = [str(tmp_path_factory.mktemp("small"))]
    dist.broadcast_object_list(paths)
    ids, width = torch.tensor([0, 7, 3], device=ranks.device), 1
    for size, group in members(ranks, groups):
        torch.manual_seed(1)
        embedding = vs.VocabParallelEmbedding(8, width, group, init_std=1.0, device=ranks.device)
        head = vs.VocabParallelLMHead(width, 8, group, weight=embedding.weight, device=ranks.device)
        full = [embedding.weight.detach().clone()]
        dist.broadcast(full[0], dist.get_global_rank(group, 0), group=group)
        assert_same_bytes(embedding(ids), full[0][ids])
        logp = head(embedding(ids), ids)
        assert_same_bytes(logp, vs.linear_logp(full[0][ids], full[0][:8], ids))
        (-logp.mean()).backward()
        assert embedding.weight.grad[head.shard.valid :].count_nonzero() == 0
        dcp.save(head.sharded_state_dict(), checkpoint_id=f"{paths[0]}/{size}", process_group=group)
        other = vs.VocabParallelLMHead(width, 8, group, device=ranks.device)
        dcp.load(other.sharded_state_dict(), checkpoint_id=f"{paths[0]}/{size}", process_group=group)
        assert_same_bytes(other.weight, head.weight, f"W = {size}")


def test_bad_ids_of_one_rank_are_an_error_on_every_rank(ranks: Ranks) -> None:
    if ranks.device.type != "cpu":
        pytest.skip("on a GPU nobody looks")
    embedding = vs.VocabParallelEmbedding(V, D, dist.group.WORLD)
    good, last = torch.arange(3), ranks.rank == ranks.world_size - 1
    for bad, kind, said in (
        (torch.tensor([0, 1, V]), ValueError, rf"input_ids\[2\] is {V}"),
        (torch.zeros(3), TypeError, "input_ids must be a tensor of int32 or int64"),
    ):
        with pytest.raises(kind, match=said):
            embedding(bad if last else good)
    if ranks.world_size > 1:
        with pytest.raises(ValueError, match="different input_ids"):
            embedding(good[:2] if last else good)
    assert embedding(good).shape == (3, D)


def test_sizes_that_differ_are_an_error_on_every_rank(ranks: Ranks) -> None:
    if ranks.world_size == 1:
        pytest.skip("one rank")
    mine = ranks.rank == ranks.world_size - 1
    for arguments, said in (
        ({"vocab_size": V + mine}, "do not agree on vocab_size"),
        (
            {"vocab_size": -1 if mine else V},
            f"rank {ranks.world_size - 1} of the group: .*vocab_size must be a positive",
        ),
        ({"hidden_size": D + mine}, "do not agree on hidden_size"),
        ({"device": "meta" if mine else ranks.device}, "do not agree on meta device"),
        ({"dtype": torch.float64 if mine else None}, "dtype must be float32"),
    ):
        for made in (vs.VocabParallelLMHead, vs.VocabParallelEmbedding):
            options = {"hidden_size": D, "vocab_size": V, "tp_group": dist.group.WORLD, "device": ranks.device}
            with pytest.raises((ValueError, TypeError), match=said):
                made(**{**options, **arguments})
    other = dist.new_group([0])
    if ranks.rank:
        with pytest.raises(ValueError, match="not a member of tp_group"):
            vs.VocabParallelLMHead(D, V, other, device=ranks.device)
