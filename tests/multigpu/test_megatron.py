"""Megatron-Core on four tensor-parallel CPU ranks: its losses and ours, sequence parallel, main_grad, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import vocabshard as vs
from vocabshard.integrations import megatron
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes
from vocabshard.testing.megatron_model import B, D, S, V, batch, gpt, groups, output_layer

pytest.importorskip("megatron.core")


@pytest.fixture(autouse=True)
def parallel_state(ranks: Ranks) -> Iterator[None]:
    """Every rank tensor parallel."""
    if ranks.device.type != "cpu":
        pytest.skip("Megatron's stand-ins are of the CPU")
    with groups(ranks.world_size):
        yield


def own(whole: Tensor, ranks: Ranks) -> Tensor:
    return whole.chunk(ranks.world_size)[ranks.rank]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_of_sharded_logits(ranks: Ranks, dtype: torch.dtype) -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as theirs

    g = torch.Generator().manual_seed(0)
    whole = (torch.randn(S, B, V, generator=g) * 4).to(dtype)
    target, upstream = torch.randint(0, V, (S, B), generator=g), torch.randn(S, B, generator=g)
    logits = whole.chunk(ranks.world_size, -1)[ranks.rank].clone().requires_grad_()
    want, found = theirs(logits.clone(), target), megatron.vocab_parallel_cross_entropy(logits, target)
    torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-5)
    assert_same_bytes(-found.detach(), vs.vocab_parallel_logp(whole, target).logp, "one rank's")
    grads = [torch.autograd.grad(x, logits, upstream)[0].float() for x in (found, want)]
    close = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(*grads, rtol=close, atol=close)


def test_shards_that_are_all_alike_are_refused(ranks: Ranks) -> None:
    """Megatron's unit test gives every rank the same logits, which is how whole logits given by mistake look."""
    if ranks.world_size == 1:
        pytest.skip("needs several ranks")
    with pytest.raises(ValueError, match="every rank holds the same"):
        megatron.vocab_parallel_cross_entropy(torch.arange(8.0).repeat(16, 4), torch.arange(0, 32, 2))


def test_label_smoothing_is_of_the_whole_vocabulary(ranks: Ranks) -> None:
    """Megatron's is of each rank's own columns, so its losses differ from rank to rank; ours are one rank's."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as theirs

    g = torch.Generator().manual_seed(0)
    whole, target = torch.randn(S, B, V, generator=g), torch.randint(0, V, (S, B), generator=g)
    logits = whole.chunk(ranks.world_size, -1)[ranks.rank].clone().requires_grad_()
    found = megatron.vocab_parallel_cross_entropy(logits, target, 0.1)
    exact = whole.double().requires_grad_()
    logp = torch.log_softmax(exact, -1)
    hit = logp.gather(-1, target[..., None])[..., 0]
    want = -0.9 * hit - 0.1 / (V - 1) * (logp.sum(-1) - hit)
    torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-5)
    found.sum().backward()
    want.sum().backward()
    mine = exact.grad.chunk(ranks.world_size, -1)[ranks.rank].float()
    torch.testing.assert_close(logits.grad, mine, rtol=1e-5, atol=1e-6)
    if ranks.world_size > 1:
        assert not torch.allclose(theirs(logits.detach().clone(), target, 0.1), want.float(), atol=1e-3)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fused_linear_over_the_group(ranks: Ranks, sequence_parallel: bool) -> None:
    """A ColumnParallelLinear and Megatron's cross entropy, and ours on the same parameter, main_grad included."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as theirs

    layer = output_layer(tensor_model_parallel_size=ranks.world_size, sequence_parallel=sequence_parallel)
    g = torch.Generator().manual_seed(3)
    hidden, labels = torch.randn(S, B, D, generator=g), torch.randint(0, V, (S, B), generator=g)
    leaf = (own(hidden, ranks) if sequence_parallel else hidden).clone().requires_grad_()
    want = theirs(layer(leaf)[0], labels)
    want.mean().backward()
    grads = leaf.grad.clone(), layer.weight.grad.clone()
    leaf.grad = layer.weight.grad = None
    layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.ones_like(layer.weight), False
    options = {"sequence_parallel": sequence_parallel, "gradient_accumulation_fusion": True}
    found = megatron.linear_cross_entropy(leaf, layer.weight, labels, layer.tp_group, "none", **options)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    found.mean().backward()
    torch.testing.assert_close(leaf.grad, grads[0], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(layer.weight.main_grad - 1, grads[1], rtol=1e-4, atol=1e-6)
    assert layer.weight.grad_added_to_main_grad


@pytest.mark.parametrize("shared", [False, True])
def test_twenty_steps_of_a_gpt_model(ranks: Ranks, shared: bool) -> None:
    """The losses of the same model with Megatron's own output layer and cross entropy.

    Not sequence parallel: Megatron's layer norm for the CPU is not.
    """
    given, found = batch(), []
    for fused in (False, True):
        model = gpt(shared, tensor_model_parallel_size=ranks.world_size)
        if fused:
            megatron.fuse_output_layer(model)
        optimiser, losses = torch.optim.AdamW(model.parameters(), lr=0.02), []
        for _ in range(20):
            optimiser.zero_grad()
            loss = model(**given).mean()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        found.append(torch.stack(losses))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert found[0][-1] < found[0][0] / 2


def test_sharded_checkpoints_are_megatrons(ranks: Ranks) -> None:
    """A head of ours is described as a ColumnParallelLinear of that padding is, whose values it may have any other way.

    By these descriptions Megatron saves and loads. Saving itself is not run: its writer forks, and hangs on the CPU.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    head = megatron.MegatronLMHead(D, V - 8, pad_to_multiple_of=V)
    layer = output_layer(tensor_model_parallel_size=ranks.world_size)
    for given in (metadata, None):
        (name, ours), *rest = head.sharded_state_dict("output_layer.", metadata=given).items()
        theirs = layer.sharded_state_dict("output_layer.", metadata=metadata)[name]
        assert not rest and isinstance(ours, ShardedTensor) and ours.data.data_ptr() == head.weight.data_ptr()
        for field in (
            "key",
            "dtype",
            "local_shape",
            "global_shape",
            "global_offset",
            "axis_fragmentations",
            "replica_id",
        ):
            assert getattr(ours, field) == getattr(theirs, field), field
        assert ours.allow_shape_mismatch  # another padding loads
    nested = megatron.sharded_state_dict(head, "x.", ((0, 1, 3),), metadata)["x.weight"]
    assert nested.global_shape == (3, V, D) and nested.global_offset[:1] == (1,)


def test_a_head_of_ours_in_a_gpt_models_place(ranks: Ranks) -> None:
    """Its parameter has Megatron's attributes, and the group is parallel_state's."""
    head = megatron.MegatronLMHead(D, V)
    assert head.shard.world_size == ranks.world_size
    assert (head.weight.tensor_model_parallel, head.weight.partition_dim, head.weight.partition_stride) == (True, 0, 1)
    hidden, labels = torch.randn(S, B, D), torch.randint(0, V, (S, B))
    dist.broadcast(hidden, 0)
    dist.broadcast(labels, 0)
    loss = megatron.linear_cross_entropy(hidden, head.weight, labels, head.shard.group, "none")
    assert_same_bytes(-loss.detach(), head(hidden, labels).detach())
