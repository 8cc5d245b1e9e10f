"""The ranks that the harness starts are one group, in order, each on its device."""

import os

import torch
import torch.distributed as dist

from vocabshard.launching import Ranks


def test_ranks_are_one_group_in_order(ranks: Ranks) -> None:
    assert (ranks.rank, ranks.world_size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    assert (dist.get_rank(), dist.get_world_size()) == (ranks.rank, ranks.world_size)
    mine = torch.tensor([ranks.rank], device=ranks.device)
    gathered = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, mine)
    assert torch.cat(gathered).tolist() == list(range(ranks.world_size))


def test_a_gpu_for_each_rank_or_none_of_nccl(ranks: Ranks) -> None:
    assert (ranks.backend == "nccl") == (torch.cuda.device_count() >= ranks.world_size)
    assert ranks.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
