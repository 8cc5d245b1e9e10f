"""RL-Kernel's linear_logp over four ranks: its own test's inputs and uneven shards, within its tolerance."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from vocabshard.integrations import rl_kernel
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

BOUNDARIES = [0, 3, 7, 12, 16]


def test_shards(ranks: Ranks) -> None:
    if ranks.world_size != 4:
        pytest.skip("needs 4 ranks")
    torch.manual_seed(2026)
    hidden, weight, bias = torch.randn(8, 5), torch.randn(16, 5), torch.randn(16)
    target, upstream = torch.tensor([0, 2, 3, 6, 7, 11, 12, 15]), torch.randn(8)
    hidden, weight, bias, target, upstream = (x.to(ranks.device) for x in (hidden, weight, bias, target, upstream))
    start, stop = BOUNDARIES[ranks.rank : ranks.rank + 2]

    whole = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    logp = rl_kernel.linear_logp(whole[0], whole[1], target, whole[2])
    of_whole = torch.autograd.grad(logp, whole, upstream)

    own = [x.clone().requires_grad_() for x in (hidden, weight[start:stop], bias[start:stop])]
    place = {"tp_group": dist.group.WORLD, "vocab_start_index": start, "global_vocab_size": 16}
    over_ranks = rl_kernel.linear_logp(own[0], own[1], target, own[2], **place)
    of_own = torch.autograd.grad(over_ranks, own, upstream)
    torch.testing.assert_close(over_ranks, logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(of_own[0], of_whole[0], atol=1e-5, rtol=0)
    for mine, all_rows in zip(of_own[1:], of_whole[1:], strict=True):
        torch.testing.assert_close(mine, all_rows[start:stop], atol=1e-5, rtol=0)


def test_even_shards_have_the_bytes_of_one_rank(ranks: Ranks) -> None:
    torch.manual_seed(1)
    width = 32
    hidden, weight = torch.randn(9, 24), torch.randn(width * ranks.world_size, 24)
    target = torch.randint(0, len(weight), (9,))
    hidden, weight, target = (x.to(ranks.device) for x in (hidden, weight, target))
    start = width * ranks.rank
    over_ranks = rl_kernel.linear_logp(
        hidden, weight[start : start + width], target, tp_group=dist.new_group(), vocab_start_index=start
    )  # a group of its own: without a size a group is of one vocabulary
    assert_same_bytes(over_ranks, rl_kernel.linear_logp(hidden, weight, target))


def test_a_start_that_is_not_this_ranks_is_an_error(ranks: Ranks) -> None:
    """Its default of 0 on every rank is no partition."""
    if ranks.world_size == 1:
        pytest.skip("needs several ranks")
    hidden, weight = torch.randn(2, 4, device=ranks.device), torch.randn(16, 4, device=ranks.device)
    target, size = torch.tensor([1, 2], device=ranks.device), 16 * ranks.world_size
    with pytest.raises(ValueError, match="vocab_start_index"):
        rl_kernel.linear_logp(hidden, weight + ranks.rank, target, tp_group=dist.group.WORLD, global_vocab_size=size)
