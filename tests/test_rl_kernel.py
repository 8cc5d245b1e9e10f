"""The operators of RL-Kernel's signatures, held against what its pages define, on the inputs of its own tests.

RL-Kernel is not on the package index, so `definition` and `definition_of_logits` stand for it. They restate its docs
(docs/operators/linear-logp.md: "Reference Semantics"; the docstring of NativeBatchInvariantLogpOp): log_softmax in fp32
of hidden @ weight.T + bias made in fp32, the target picked; ignored rows of batch_invariant_logp are 0.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vocabshard.integrations import rl_kernel
from vocabshard.integrations.rl_kernel import kernel_registry
from vocabshard.testing.compare import assert_same_bytes

N, D, V = 40, 80, 300  # its sizes, off every block


def definition(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
    logits = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    return torch.log_softmax(logits, -1).gather(-1, target.long()[..., None])[..., 0]


def definition_of_logits(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    counts = target != ignore_index
    picked = torch.log_softmax(logits.float(), -1).gather(-1, target.where(counts, 0)[..., None])[..., 0]
    return picked.where(counts, 0)


def inputs(dtype: torch.dtype, with_bias: bool, lead: tuple[int, ...] = (N,)) -> tuple[Tensor, ...]:
    hidden, weight = torch.randn(*lead, D).to(dtype), torch.randn(V, D).to(dtype)
    bias = torch.randn(V).to(dtype) if with_bias else None
    return hidden, weight, torch.randint(0, V, lead), bias  # type: ignore[return-value]


@pytest.mark.parametrize("lead", [(N,), (2, 3), (1, 6), ()])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_linear_logp(lead: tuple[int, ...], with_bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, target, bias = inputs(dtype, with_bias, lead)
    logp = kernel_registry.get_op("linear_logp")(hidden, weight, target, bias)
    assert logp.dtype == torch.float32 and logp.shape == target.shape
    # atol with rtol 1e-5, as its own allclose
    torch.testing.assert_close(logp, definition(hidden, weight, target, bias), atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_logp_gradients(with_bias: bool) -> None:
    """Its upstream gradients: some 0, some negative, one a row; its 6 x 7 x 19 layout test."""
    hidden, weight = torch.randn(6, 7), torch.randn(19, 7)
    bias = torch.randn(19) if with_bias else None
    target, upstream = torch.tensor([1, 7, 3, 5, 0, 9]), torch.tensor([0.5, 0.0, -1.25, 0.75, 0.0, 1.5])
    found = []
    for logp in (rl_kernel.linear_logp, definition):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
        out = logp(leaves[0].view(2, 3, 7), leaves[1], target.view(2, 3), leaves[2] if with_bias else None)
        found.append(torch.autograd.grad(out, leaves, upstream.view(2, 3)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_every_target_counts() -> None:
    hidden, weight, target, bias = inputs(torch.float32, True)
    for wrong in (-100, V, -1):
        target[5] = wrong
        with pytest.raises(ValueError, match=f"{wrong}"):
            rl_kernel.linear_logp(hidden, weight, target, bias)


def test_a_shard_without_a_group_is_refused() -> None:
    """The two messages that its own test asks for are errors here too, of the same type."""
    hidden, weight, target, bias = inputs(torch.float32, True)
    with pytest.raises(ValueError, match="vocab_start_index"):
        rl_kernel.linear_logp(hidden, weight, target, bias, vocab_start_index=4)
    with pytest.raises(ValueError, match="global_vocab_size"):
        rl_kernel.linear_logp(hidden, weight, target, bias, global_vocab_size=V + 1)
    with pytest.raises(ValueError, match="target_ids"):
        rl_kernel.linear_logp(hidden, weight, torch.zeros(N + 1, dtype=torch.long), bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(8,), (16,), (2, 3), (1,)])
def test_batch_invariant_logp(lead: tuple[int, ...], dtype: torch.dtype) -> None:
    logits, target = torch.randn(*lead, 1000).to(dtype), torch.randint(0, 1000, lead)
    target.view(-1)[-1] = -100
    op = kernel_registry.get_op("batch_invariant_logp")
    expected = definition_of_logits(logits, target)
    torch.testing.assert_close(op(logits, target), expected, atol=1e-6, rtol=1e-5)
    logp, lse = op.forward_with_lse(logits, target)
    assert_same_bytes(logp, op.apply(logits, target))
    torch.testing.assert_close(lse, torch.logsumexp(logits.float(), -1), atol=1e-6, rtol=1e-5)
    mine, theirs = (logits.float().clone().requires_grad_() for _ in range(2))
    op(mine, target).sum().backward()
    definition_of_logits(theirs, target).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)
    assert not mine.grad.reshape(-1, 1000)[-1].any()


def test_a_row_is_the_same_alone_and_anywhere() -> None:
    """What its batch-invariance tests ask: the bytes of the row by itself."""
    row, others, target = torch.randn(1, 1000), torch.randn(64, 1000), torch.randint(0, 1000, (65,))
    alone = rl_kernel.batch_invariant_logp(row, target[:1])
    for place in (0, 13, 64):
        batch = torch.cat([others[:place], row, others[place:]])
        ids = torch.cat([target[1 : place + 1], target[:1], target[place + 1 :]])
        assert_same_bytes(rl_kernel.batch_invariant_logp(batch, ids)[place : place + 1], alone)


def test_validate() -> None:
    logits, target = torch.randn(3, 50), torch.tensor([1, 50, -100])
    with pytest.raises(ValueError, match="50"):
        rl_kernel.batch_invariant_logp(logits, target)
    logp = rl_kernel.batch_invariant_logp(logits, target, validate=False)
    assert torch.isnan(logp).tolist() == [False, True, False]
    assert rl_kernel.batch_invariant_logp(logits, target, ignore_index=50, validate=False)[1] == 0


def test_signatures() -> None:
    """Name by name, with their defaults, as its ops declare them."""

    def told(function: object) -> dict[str, object]:
        return {p.name: (p.kind.name, p.default) for p in inspect.signature(function).parameters.values()}

    none, word = inspect.Parameter.empty, "KEYWORD_ONLY"
    assert told(rl_kernel.linear_logp) == {
        **{name: ("POSITIONAL_OR_KEYWORD", none) for name in ("hidden", "lm_head_weight", "target_ids")},
        "bias": ("POSITIONAL_OR_KEYWORD", None),
        "tp_group": (word, None),
        "vocab_start_index": (word, 0),
        "global_vocab_size": (word, None),
    }
    assert told(rl_kernel.batch_invariant_logp) == {
        **{name: ("POSITIONAL_OR_KEYWORD", none) for name in ("logits", "target_ids")},
        "ignore_index": ("POSITIONAL_OR_KEYWORD", -100),
        "validate": (word, True),
    }


def test_other_operators_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="not 'rms_norm'"):
        kernel_registry.get_op("rms_norm")
