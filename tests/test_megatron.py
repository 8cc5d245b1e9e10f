"""Megatron-Core's functions and a GPTModel with and without ours, in one process; megatron-core's own numbers count."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import vocabshard as vs
from vocabshard.integrations import megatron
from vocabshard.testing.compare import assert_same_bytes
from vocabshard.testing.megatron_model import B, D, S, V, batch, gpt, groups

pytest.importorskip("megatron.core")


@pytest.fixture(autouse=True)
def parallel_state() -> Iterator[None]:
    """Megatron's groups over this process alone."""
    with groups():
        yield


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_of_logits(smoothing: float, dtype: torch.dtype) -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as theirs

    logits = (torch.randn(S, B, V) * 4).to(dtype).requires_grad_()
    target, upstream = torch.randint(0, V, (S, B)), torch.randn(S, B)
    want = theirs(logits.clone(), target, smoothing)
    found = megatron.vocab_parallel_cross_entropy(logits, target, smoothing)
    assert found.shape == (S, B) and found.dtype == torch.float32
    torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(x, logits, upstream)[0].float() for x in (found, want)]
    close = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(*grads, rtol=close, atol=close)
    group = dist.group.WORLD
    alone = megatron.fused_vocab_parallel_cross_entropy(logits, target, group)
    assert_same_bytes(-alone.detach(), vs.vocab_parallel_logp(logits.detach(), target).logp)


def test_megatrons_own_input() -> None:
    """Its unit test's logits, the four ranks' side by side, and its expected losses, which it compares as integers."""
    logits, target = torch.arange(8.0).repeat(16, 16), torch.arange(0, 32, 2)
    expected = torch.tensor([10.2309, 8.2309, 6.2309, 4.2309]).repeat(4)
    torch.testing.assert_close(megatron.vocab_parallel_cross_entropy(logits, target), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("reduction, ignored", [("none", -100), ("sum", 4), ("mean", 4), ("mean", -100)])
@pytest.mark.parametrize("rows, vocabulary, depth", [((80,), 125, 64), ((1, 96), 3008, 128), ((2, 48), 3007, 128)])
def test_fused_linear_at_megatrons_inputs(
    reduction: str, ignored: int, rows: tuple[int, ...], vocabulary: int, depth: int
) -> None:
    """Uniform bf16, its ways of ignoring, its upstream gradients, at fewer columns; within its tolerances by far."""
    hidden, weight = (torch.empty(*n, depth).uniform_(-0.1, 0.1).bfloat16() for n in (rows, (vocabulary,)))
    labels = torch.randint(0, vocabulary, rows)
    if ignored >= 0:
        labels = F.pad(labels, (0, 1), value=ignored)[..., 1:].contiguous()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    logits = (leaves[0].float() @ leaves[1].float().T).flatten(0, -2)
    want = F.cross_entropy(logits, labels.flatten(), reduction=reduction, ignore_index=ignored)
    found = megatron.linear_cross_entropy(*leaves, labels, reduction=reduction, ignore_index=ignored)
    assert found.shape == (labels.shape if reduction == "none" else ())
    torch.testing.assert_close(found, want.view(found.shape), rtol=1e-6, atol=1e-6)
    upstream = torch.empty_like(want).uniform_(-0.1, 0.1)
    grads = torch.autograd.grad(found, leaves, upstream.view(found.shape))
    for grad, wanted in zip(grads, torch.autograd.grad(want, leaves, upstream), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-2, atol=2e-4)


def test_main_grad_is_added_to_as_megatrons_fusion_does() -> None:
    hidden, labels = torch.randn(S, B, D), torch.randint(0, V, (S, B))
    weight = nn.Parameter(torch.randn(V, D))
    megatron.linear_cross_entropy(hidden, weight, labels).backward()
    wanted, weight.grad = weight.grad, None
    with pytest.raises(ValueError, match=r"weight\.main_grad"):
        megatron.linear_cross_entropy(hidden, weight, labels, gradient_accumulation_fusion=True)
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(V, D), False
    megatron.linear_cross_entropy(hidden, weight, labels, gradient_accumulation_fusion=True).backward()
    torch.testing.assert_close(weight.main_grad, 1 + wanted)
    assert weight.grad_added_to_main_grad and (weight.grad == 0).all()
    weight.requires_grad_(False)
    megatron.linear_cross_entropy(hidden.requires_grad_(), weight, labels, gradient_accumulation_fusion=True).backward()
    torch.testing.assert_close(weight.main_grad, 1 + wanted)


@pytest.mark.parametrize("shared", [False, True])
def test_a_gpt_model_without_its_logits(shared: bool) -> None:
    """Losses, all gradients, logits without labels; and all of it as it was afterwards."""
    model, given = gpt(shared), batch()
    want = model(**given)
    want.mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    inputs = {name: x for name, x in given.items() if name != "labels"}
    logits = model(**inputs)
    signature = inspect.signature(model.forward)
    assert megatron.fuse_output_layer(model) is model
    assert inspect.signature(model.forward) == signature
    found = model(**given)
    assert found.shape == (B, S)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    found.mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-6)
    assert torch.equal(model(**inputs), logits)
    with pytest.raises(ValueError, match="fused already"):
        megatron.fuse_output_layer(model)
    megatron.unfuse_output_layer(megatron.unfuse_output_layer(model))
    assert torch.equal(model(**given), want)
    assert not {"forward", "compute_language_model_loss"} & set(model.__dict__)


def test_the_bytes_of_a_gpt_models_losses_are_the_contracts() -> None:
    model, given = megatron.fuse_output_layer(gpt(), real_vocab_size=V - 2, temperature=0.7), batch()
    given["labels"].clamp_(max=V - 3)
    seen: list[Tensor] = []
    model.output_layer.register_forward_hook(lambda layer, args, out: seen.append(args[0]))
    losses = model(**given)
    want = vs.linear_logp(
        seen[0], model.output_layer.weight, given["labels"].T.contiguous(), real_vocab_size=V - 2, temperature=0.7
    )
    assert_same_bytes(losses.detach(), -want.detach().T.contiguous())


def test_the_newer_output_layers_call() -> None:
    """LinearCrossEntropyModule of Megatron's development: the layer itself is asked for the loss."""
    model, given = megatron.fuse_output_layer(gpt()), batch()
    hidden = torch.randn(S, B, D)
    rows = model.output_layer(hidden, output_cross_entropy_loss=True, labels=given["labels"])
    assert rows.shape == (B, S)
    mean = model.output_layer(hidden, output_cross_entropy_loss=True, labels=given["labels"], reduction="mean")
    torch.testing.assert_close(mean, rows.mean())


def test_wrapped_models_stages_and_other_layers() -> None:
    model = gpt()
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module.module = model
    megatron.fuse_output_layer(wrapped)
    assert "forward" in model.__dict__
    megatron.unfuse_output_layer(wrapped)
    assert "forward" not in model.__dict__
    stage = nn.Linear(2, 2)
    assert megatron.fuse_output_layer(stage) is stage
    model.output_layer.config.defer_embedding_wgrad_compute = True
    with pytest.raises(NotImplementedError, match="defer_embedding_wgrad_compute"):
        megatron.fuse_output_layer(model)
    for option in ("tempreature", "tp_group", "return_entropy", "bias"):
        with pytest.raises(TypeError, match=f"'{option}' is not an option"):
            megatron.fuse_output_layer(gpt(), **{option: None})
    other = types.SimpleNamespace(output_layer=stage, post_process=True)
    with pytest.raises(NotImplementedError, match="Linear"):
        megatron.fuse_output_layer(other)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda x: megatron.vocab_parallel_cross_entropy(*x, 1.0), ValueError, "label_smoothing"),
        (lambda x: megatron.vocab_parallel_cross_entropy(*x, "0.1"), TypeError, "label_smoothing must be a number"),
        (lambda x: megatron.vocab_parallel_cross_entropy(*x, 0.1, temperature=2.0), NotImplementedError, "temperature"),
        (lambda x: megatron.vocab_parallel_cross_entropy(*x, return_entropy=True), NotImplementedError, "entropy"),
        (lambda x: megatron.linear_cross_entropy(x[0], torch.ones(4, V), x[1], reduction="max"), ValueError, "max"),
        (lambda x: megatron.linear_cross_entropy(x[0], None, x[1]), TypeError, "weight must be a torch.Tensor"),
        (lambda x: megatron.linear_cross_entropy(x[0], torch.ones(4, V), x[1], topk=2), NotImplementedError, "topk"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call((torch.randn(S, B, V), torch.zeros(S, B, dtype=torch.long)))


def test_signatures_are_megatrons() -> None:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    for theirs in (vocab_parallel_cross_entropy, fused_vocab_parallel_cross_entropy):
        ours = list(inspect.signature(getattr(megatron, theirs.__name__)).parameters)
        assert ours[: len(inspect.signature(theirs).parameters)] == list(inspect.signature(theirs).parameters)
