"""A tiny GPTModel of megatron-core on the CPU, where it asks for a GPU only for scratch buffers and dropout's seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

S, B, D, V = 8, 2, 32, 128


@contextlib.contextmanager
def groups(tp: int = 1) -> Iterator[Any]:
    """Megatron's parallel_state over the default group, `tp` ranks tensor parallel; undone afterwards. Collective."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with (
            mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
            mock.patch.object(torch.cuda, "synchronize", lambda: None),
            mock.patch.object(CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext()),
        ):
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
            yield parallel_state
            parallel_state.destroy_model_parallel()
    finally:
        if alone:
            dist.destroy_process_group()


def config(**changed: Any) -> Any:
    """A TransformerConfig of one layer without dropout, of modules that need neither GPU nor Transformer Engine."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    given: dict[str, Any] = dict(
        num_layers=1, hidden_size=D, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    return TransformerConfig(**{**given, **changed})


def gpt(shared: bool = False, vocab_size: int = V, length: int = S, **changed: Any) -> Any:
    """shared: the output layer uses the embedding's weight. Further arguments are the config's."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(0)
    return GPTModel(
        config(**changed), get_gpt_layer_local_spec(), vocab_size=vocab_size, max_sequence_length=length,
        share_embeddings_and_output_weights=shared,
    )  # fmt: skip


def output_layer(**changed: Any) -> Any:
    """The ColumnParallelLinear that a GPTModel would have."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    torch.manual_seed(0)
    return ColumnParallelLinear(D, V, config=config(**changed), init_method=torch.nn.init.normal_, bias=False)


def batch() -> dict[str, Tensor]:
    """The arguments of a GPTModel's call, labels [B, S] included."""
    ids = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 1, S, S).triu(1).bool()
    given = {"input_ids": ids[:, :-1], "position_ids": torch.arange(S).expand(B, S), "attention_mask": mask}
    return {**given, "labels": ids[:, 1:]}
