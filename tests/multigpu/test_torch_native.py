"""PyTorch's own parallelism around our head: losses over a group, the style, and twenty steps under FSDP2 and TP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import vocabshard as vs
from vocabshard.dist.gather import gather_tensors
from vocabshard.integrations.torch_native import VocabParallelHeadStyle, linear_cross_entropy
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

B, S, D, V = 4, 8, 32, 256


def problem(device: torch.device, vocabulary: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(B, S, D, generator=g), torch.randn(vocabulary, D, generator=g)
    target = torch.randint(0, vocabulary, (B, S), generator=g)
    target[0, 3] = -100
    return hidden.to(device), weight.to(device), torch.randn(vocabulary, generator=g).to(device), target.to(device)


@pytest.mark.parametrize("smoothing, z_loss, weighted", [(0.0, 0.0, False), (0.1, 1e-3, False), (0.1, 0.0, True)])
def test_losses_over_a_group(ranks: Ranks, smoothing: float, z_loss: float, weighted: bool) -> None:
    """The loss and all gradients of one rank, and the same loss on every rank."""
    hidden, weight, bias, target = problem(ranks.device)
    class_weight = torch.linspace(0.5, 2, V - 8, device=ranks.device) if weighted else None
    target = target.clamp(max=V - 9)
    options = {
        "weight": class_weight, "label_smoothing": smoothing, "z_loss": z_loss, "real_vocab_size": V - 8,
    }  # fmt: skip

    def run(rows: slice, **group) -> tuple[Tensor, list[Tensor]]:
        leaves = [hidden.clone(), weight[rows].clone(), bias[rows].clone()]
        for leaf in leaves:
            leaf.requires_grad_()
        loss = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], **options, **group)
        loss.backward()
        return loss.detach(), [leaf.grad for leaf in leaves]

    size = V // ranks.world_size
    rows = slice(ranks.rank * size, (ranks.rank + 1) * size)
    loss, grads = run(rows, tp_group=dist.group.WORLD, global_vocab_size=V)
    want, whole = run(slice(None))
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)
    for grad, alone in zip(grads, (whole[0], whole[1][rows], whole[2][rows]), strict=True):
        torch.testing.assert_close(grad, alone, rtol=1e-5, atol=1e-7)
    assert_same_bytes(gather_tensors(loss, dist.group.WORLD), loss.expand(ranks.world_size), "on every rank")


@pytest.mark.parametrize("layout", ["replicated", "rows", "batch", "DTensor"])
def test_the_style_takes_hidden_in_every_layout(ranks: Ranks, layout: str) -> None:
    """logp has the bytes of one rank; hidden's gradient comes back in hidden's own layout."""
    if ranks.device.type == "cuda" and ranks.backend != "nccl":
        pytest.skip("DTensor gathers no CUDA tensors over gloo")
    hidden, weight, bias, target = problem(ranks.device)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    head = nn.Linear(D, V, device=ranks.device)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    whole_leaf = hidden.clone().requires_grad_()
    want = vs.linear_logp(whole_leaf, weight, target, bias, temperature=0.7)
    want.sum().backward()
    chunk = {"rows": (0, Shard(0)), "batch": (1, Shard(1)), "DTensor": (1, Replicate())}.get(layout, (0, Replicate()))
    style = VocabParallelHeadStyle(input_layouts=chunk[1], temperature=0.7)
    parallelize_module(head, mesh, style)
    assert isinstance(head.weight, DTensor) and list(head.weight.placements) == [Shard(0)]
    part = hidden if layout == "replicated" else hidden.chunk(ranks.world_size, chunk[0])[ranks.rank]
    leaf = part.contiguous().requires_grad_()
    given = DTensor.from_local(leaf, mesh, [Shard(1)]) if layout == "DTensor" else leaf
    logp = head(given, target)
    assert_same_bytes(logp, want.detach())
    logp.sum().backward()
    mine = whole_leaf.grad if layout == "replicated" else whole_leaf.grad.chunk(ranks.world_size, chunk[0])[ranks.rank]
    torch.testing.assert_close(leaf.grad, mine, rtol=1e-4, atol=1e-6)
    assert isinstance(head.weight.grad, DTensor)
    logits = head(given)
    torch.testing.assert_close(logits, F.linear(hidden, weight, bias), rtol=1e-4, atol=1e-4)


class Model(nn.Module):
    """An embedding, a block with tensor parallelism of PyTorch's own, and the head."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.embedding, self.up = nn.Embedding(V, D), nn.Linear(D, 2 * D, bias=False)
        self.down, self.lm_head = nn.Linear(2 * D, D, bias=False), nn.Linear(D, V, bias=False)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.2, generator=g)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, ids: Tensor, target: Tensor, own_head: bool) -> Tensor:
        if own_head:
            logits = self.lm_head(self.hidden(ids))
            return F.cross_entropy(logits.flatten(0, 1), target.flatten())
        return -self.lm_head(self.hidden(ids), target).sum() / (target != -100).sum()


def test_twenty_steps_under_fsdp2_and_tp(ranks: Ranks) -> None:
    """FSDP2 over two replicas of two tensor-parallel ranks each: the losses of one process and F.cross_entropy."""
    if ranks.world_size != 4:
        pytest.skip("needs 4 ranks")
    if ranks.device.type == "cuda" and ranks.backend != "nccl":
        pytest.skip("DTensor gathers no CUDA tensors over gloo")
    mesh = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(0, V, (B, S + 1), generator=g).to(ranks.device)
    ids[:, 1::2] = (ids[:, 0::2][:, : S // 2] * 7 + 3) % V  # something to learn

    def train(model: Model, rows: slice, own_head: bool) -> list[Tensor]:
        optimiser, losses = torch.optim.AdamW(model.parameters(), lr=0.02), []
        for _ in range(20):
            loss = model(ids[rows, :-1], ids[rows, 1:], own_head)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.detach())
        return losses

    want = torch.stack(train(Model().to(ranks.device), slice(None), True))
    model = Model().to(ranks.device)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "lm_head": VocabParallelHeadStyle()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model.lm_head, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    replica = mesh["dp"].get_local_rank()
    losses = torch.stack(train(model, slice(replica * 2, replica * 2 + 2), False))
    dist.all_reduce(losses, group=mesh["dp"].get_group())
    torch.testing.assert_close(losses / 2, want, rtol=1e-4, atol=1e-4)
    assert want[-1] < want[0] - 1  # it has learnt, so the gradients mattered
