"""A patched causal LM on several ranks: one rank's bytes, whole gradients of whole weights, DTensors, FSDP2, steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from vocabshard.integrations import huggingface as hf
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

transformers = pytest.importorskip("transformers")

V, B, S = 203, 4, 9


def make(ranks: Ranks, **changed: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **dict(
            vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, initializer_range=0.2, attn_implementation="eager",
        ) | changed,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).to(ranks.device)


def batch(ranks: Ranks) -> dict[str, Tensor]:
    ids = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(1)).to(ranks.device)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def score(model: Any, given: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    out = model(**given)
    (out.loss + out.entropy.mean()).backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_whole_weights_over_a_group(ranks: Ranks, tied: bool) -> None:
    """203 rows cut at multiples of 16: the bytes of one rank, and every gradient complete on every rank."""
    given = batch(ranks)
    want, grads = score(hf.patch_lm_head(make(ranks, tie_word_embeddings=tied)), given)
    model = make(ranks, tie_word_embeddings=tied)
    out, found = score(hf.patch_lm_head(model, dist.group.WORLD, temperature=1.0), given)
    for part in ("log_probs", "entropy", "lse"):
        assert_same_bytes(getattr(out, part).detach(), getattr(want, part).detach())
    for name, grad in found.items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    hf.unpatch_lm_head(model)
    frozen = make(ranks)
    frozen.lm_head.weight.requires_grad_(False)
    out, found = score(hf.patch_lm_head(frozen, dist.group.WORLD), given)
    assert found["lm_head.weight"] is None
    assert found["model.norm.weight"] is not None


def test_a_weight_that_tensor_parallelism_sharded(ranks: Ranks) -> None:
    """The head under PyTorch's own ColwiseParallel, with its hooks: the DTensor brings the group."""
    if ranks.device.type == "cuda" and ranks.backend != "nccl":
        pytest.skip("DTensor gathers no CUDA tensors over gloo")
    given, mesh = batch(ranks), init_device_mesh(ranks.device.type, (ranks.world_size,))
    rows = -(-V // (16 * ranks.world_size)) * 16 * ranks.world_size
    want, grads = score(hf.patch_lm_head(make(ranks, vocab_size=rows)), given)
    model = make(ranks, vocab_size=rows)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    out, found = score(hf.patch_lm_head(model), given)
    assert_same_bytes(out.log_probs.detach(), want.log_probs.detach())
    for name in ("lm_head.weight", "model.norm.weight"):
        grad, wanted = found[name], grads[name]
        if name == "lm_head.weight":
            grad, wanted = grad.to_local(), wanted.chunk(ranks.world_size)[ranks.rank]
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="brings its own group"):
        hf.patch_lm_head(hf.unpatch_lm_head(model), dist.group.WORLD)(**given)


@pytest.mark.parametrize("whole_model", [False, True])
def test_twenty_steps_under_fsdp2(ranks: Ranks, whole_model: bool) -> None:
    """The head sharded by itself or with the model, a batch of its own on each rank: the losses of one process."""
    if ranks.device.type == "cuda" and ranks.backend != "nccl":
        pytest.skip("FSDP2 gathers no CUDA tensors over gloo")
    given = {"input_ids": batch(ranks)["input_ids"]}
    given["labels"] = given["input_ids"]
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))

    def train(model: Any, rows: slice) -> Tensor:
        optimiser, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for _ in range(20):
            optimiser.zero_grad()
            loss = model(**{name: x[rows] for name, x in given.items()}).loss
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    want = train(make(ranks), slice(None))  # with its logits
    model = hf.patch_lm_head(make(ranks))
    if not whole_model:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    share = B // ranks.world_size
    losses = train(model, slice(ranks.rank * share, (ranks.rank + 1) * share))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / ranks.world_size, want, rtol=1e-4, atol=1e-4)
    assert want[-1] < want[0] / 2
