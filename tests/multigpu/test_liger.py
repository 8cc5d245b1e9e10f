"""Liger's scaled cross entropy over ranks: its own test's inputs within its tolerances, and the bytes of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from vocabshard.integrations import liger
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

TOKENS, HIDDEN, LOCAL, T, IGNORED = 521, 2048, 320, 0.8, -100


def test_scaled(ranks: Ranks) -> None:
    """bf16, logits about N(0, 0.1): against fp32 products of the whole head."""
    whole_size = LOCAL * ranks.world_size
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2027)).mul_(0.05)
    shards = [torch.randn(LOCAL, HIDDEN, generator=torch.Generator().manual_seed(3100 + r)).mul_(0.05)
              for r in range(ranks.world_size)]  # fmt: skip
    whole = torch.cat(shards).to(ranks.device, torch.bfloat16)
    hidden = hidden.to(ranks.device, torch.bfloat16).requires_grad_()
    own = slice(LOCAL * ranks.rank, LOCAL * (ranks.rank + 1))
    weight = whole[own].clone().requires_grad_()
    target = (torch.arange(TOKENS, device=ranks.device) * 17 + 3) % whole_size
    target[::19] = IGNORED
    upstream = [torch.linspace(*ends, TOKENS, device=ranks.device) for ends in ((0.25, 1.0), (-0.2, 0.3))]

    outputs = liger.liger_fused_linear_scaled_cross_entropy_tp(
        hidden, weight, target, dist.group.WORLD, T, IGNORED, 1, True
    )
    grad_hidden, grad_weight = torch.autograd.grad(outputs, (hidden, weight), upstream)

    leaves = [x.detach().float().requires_grad_() for x in (hidden, whole)]
    logp = torch.log_softmax(leaves[0] @ leaves[1].t() / T, -1)
    counts = target != IGNORED
    nll = (-logp.gather(1, target.where(counts, 0)[:, None])[:, 0]).where(counts, 0)
    entropy = (-(logp.exp() * logp).sum(-1)).where(counts, 0)
    expected = torch.autograd.grad((nll, entropy), leaves, upstream)
    for mine, wanted in zip(outputs, (nll, entropy), strict=True):
        torch.testing.assert_close(mine, wanted, atol=3e-4, rtol=3e-4)
    torch.testing.assert_close(grad_hidden.float(), expected[0], atol=8e-3, rtol=4e-2)
    torch.testing.assert_close(grad_weight.float(), expected[1][own], atol=8e-3, rtol=4e-2)

    alone = liger.LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, whole, target, T, IGNORED, 1, True)
    for mine, one in zip(outputs, alone, strict=True):
        assert_same_bytes(mine, one)
    of_the_world = liger.LigerFusedLinearScaledCrossEntropyTPFunction.apply(hidden, weight, target, None, T)
    assert_same_bytes(of_the_world, outputs[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocab_parallel_loss(ranks: Ranks, smoothing: float) -> None:
    torch.manual_seed(0)
    width = 32
    logits = torch.randn(5, 2, width * ranks.world_size, device=ranks.device, requires_grad=True)
    target = torch.randint(logits.shape[-1], (5, 2), device=ranks.device)
    target[1, 1] = IGNORED
    upstream = torch.arange(10.0, device=ranks.device).view(5, 2)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(expected.view(5, 2), logits, upstream)
    own = slice(width * ranks.rank, width * (ranks.rank + 1))
    local = logits.detach()[..., own].clone().requires_grad_()
    loss = liger.LigerVocabParallelCrossEntropy(label_smoothing=smoothing)(local, target, dist.group.WORLD)
    (mine,) = torch.autograd.grad(loss, local, upstream)
    torch.testing.assert_close(loss, expected.view(5, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine, gradient[..., own], atol=1e-5, rtol=1e-5)


def test_smoothing_by_partitions_is_refused(ranks: Ranks) -> None:
    if ranks.world_size == 1:
        pytest.skip("one rank's partition is the whole")
    loss = liger.LigerVocabParallelCrossEntropy(label_smoothing=0.1, label_smoothing_mode="partition")
    logits = torch.randn(2, 1, 48, device=ranks.device) + ranks.rank
    with pytest.raises(NotImplementedError, match='label_smoothing_mode="partition" is not supported'):
        loss(logits, torch.zeros(2, 1, dtype=torch.int64, device=ranks.device), dist.group.WORLD)
