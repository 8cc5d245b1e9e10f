"""The Triton kernels as one module of the kernel interface."""

from __future__ import annotations

import torch

from vocabshard.kernels.triton_backward import backward
from vocabshard.kernels.triton_linear import forward, kept_bytes_per_row, new_kept, projection_id
from vocabshard.kernels.triton_logits import logits_backward, logits_forward

# grad_hidden goes on from given accumulators as one ascending chain
CONTINUES_CHAIN = (torch.float32, torch.bfloat16, torch.float16)
TAKES_CUT = ("forward", "backward")

__all__ = [
    "backward",
    "forward",
    "kept_bytes_per_row",
    "logits_backward",
    "logits_forward",
    "new_kept",
    "projection_id",
]
