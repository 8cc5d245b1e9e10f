"""A stand-in for the part of Vime that calls a provider: requests, its rules for results, and its own log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Which rows of a sequence a rank owns."""

    world_size: int = 1
    rank: int = 0
    layout: str = "single"


@dataclass(frozen=True)
class Projection:
    """This rank's part of the head."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Partition:
    """Which columns of the vocabulary that is."""

    local_start: int
    local_size: int
    real_size: int | None
    padded_size: int | None


@dataclass(frozen=True)
class Context:
    """What a provider may score from instead of logits."""

    hidden: Tensor
    projection: Projection
    vocab_partition: Partition | None


@dataclass(frozen=True)
class Request:
    """What a provider is asked for."""

    logits: Any
    target_ids: Tensor
    tensor_parallel_group: Any = None
    token_layout: Any = field(default_factory=Layout)
    with_entropy: bool = False
    with_entropy_grad: bool = False
    chunk_size: int = -1
    log_prob_keep_mask: Tensor | None = None
    context: Context | None = None
    temperature: float | Tensor | None = None
    metadata: Any = field(default_factory=dict)


class NoLogits:
    """Stands where logits would: a provider that has hidden states must not ask it anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the provider read logits.{name}")


def native(logits: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """The engine's own: the mask is for the log-prob alone."""
    y = logits.float() if request.temperature is None else logits.float() / request.temperature
    masked = y if request.log_prob_keep_mask is None else y.masked_fill(~request.log_prob_keep_mask, float("-inf"))
    logp = torch.log_softmax(masked, -1).gather(-1, request.target_ids[:, None])
    p = torch.softmax(y, -1)
    return logp, -(p * torch.log_softmax(y, -1)).sum(-1) if request.with_entropy else None


def compute(
    request: Request, provider: Callable[[Any], Any], mode: str, fallback: Callable[[], Any]
) -> tuple[Tensor, Tensor | None, Any]:
    """logp, entropy and the result, or the fallback's where a provider in auto declares itself unavailable."""
    try:
        result = provider(request)
    except Exception as error:
        if mode == "auto" and getattr(error, "linear_logp_provider_unavailable", False):
            return (*fallback(), None)
        raise
    rows = request.target_ids.shape[0]
    assert result.logp.shape == (rows, 1) and result.logp.is_floating_point()
    assert (result.entropy is not None) == request.with_entropy
    if request.with_entropy:
        assert result.entropy.shape == (rows,)
    assert result.backend_id and result.contract_id and isinstance(result.provenance, dict)
    if request.with_entropy_grad and result.entropy is not None:
        assert result.entropy.requires_grad
    return result.logp, result.entropy, result
