"""verl's linear_cross_entropy over a group: one rank's values, parts of hidden's gradient that add up, twenty steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import vocabshard as vs
from vocabshard.dist.gather import gather_tensors
from vocabshard.integrations.verl import linear_cross_entropy
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

N, D, V = 24, 32, 256


def problem(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, N // 2, D, generator=g), torch.randn(V, D, generator=g)
    return hidden.to(device), weight.to(device), torch.randint(0, V, (2, N // 2), generator=g).to(device)


def test_values_are_one_ranks_and_gradients_add_up(ranks: Ranks) -> None:
    hidden, weight, labels = problem(ranks.device)
    size = V // ranks.world_size
    rows = slice(ranks.rank * size, (ranks.rank + 1) * size)
    alone = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    want = vs.linear_logp(*alone, labels, temperature=1.5, return_entropy=True)
    (want.logp.sum() + 0.3 * want.entropy.sum()).backward()
    for grad_hidden in ("parts", "whole"):
        leaves = [hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()]
        options = {"grad_hidden": grad_hidden, "global_vocab_size": V}
        logp, entropy = linear_cross_entropy(*leaves, labels, 1.5, "none", dist.group.WORLD, **options)
        assert_same_bytes(logp, want.logp.detach().flatten())
        assert_same_bytes(entropy, want.entropy.detach().flatten())
        (logp.sum() + 0.3 * entropy.sum()).backward()
        if grad_hidden == "parts":
            dist.all_reduce(leaves[0].grad)  # as verl's caller does
        torch.testing.assert_close(leaves[0].grad, alone[0].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(leaves[1].grad, alone[1].grad[rows], rtol=1e-4, atol=1e-5)


class GatherSequence(torch.autograd.Function):
    """Megatron's gather_from_sequence_parallel_region: its backward adds up the ranks' gradients and cuts."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        ctx.rows = part.shape[0]
        return gather_tensors(part, dist.group.WORLD).flatten(0, 1)

    @staticmethod
    def backward(ctx, upstream: Tensor) -> Tensor:
        total = upstream.contiguous().clone()
        dist.all_reduce(total)
        return total[dist.get_rank() * ctx.rows :][: ctx.rows]


def test_twenty_steps_as_verls_fused_forward(ranks: Ranks) -> None:
    """PPO's loss on a sequence-parallel hidden state, gathered as verl gathers it, beside one process with logits."""
    hidden, weight, labels = problem(ranks.device)
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    size, part = V // ranks.world_size, N // ranks.world_size
    advantage = torch.randn(N, generator=torch.Generator().manual_seed(5)).to(ranks.device)

    def train(leaves: list[Tensor], scores) -> Tensor:
        optimiser, losses, old = torch.optim.SGD(leaves, lr=0.5), [], None
        for _ in range(20):
            logp, entropy = scores(*leaves)
            old = logp.detach() if old is None else old
            ratio = torch.exp(logp - old)
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() - 0.01 * entropy.mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    def over_logits(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logp = F.log_softmax(hidden @ weight.T / 1.5, -1)
        return logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def ours(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        whole = GatherSequence.apply(hidden)
        return linear_cross_entropy(whole, weight, labels, 1.5, "none", dist.group.WORLD, global_vocab_size=V)

    want = train([hidden.clone().requires_grad_(), weight.clone().requires_grad_()], over_logits)
    own = [hidden[ranks.rank * part :][:part], weight[ranks.rank * size :][:size]]
    losses = train([t.clone().requires_grad_() for t in own], ours)
    torch.testing.assert_close(losses, want, rtol=1e-4, atol=1e-4)
    assert want[-1] < want[0] - 0.05
