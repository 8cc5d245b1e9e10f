"""The Triton kernels as one module of the kernel interface."""

from __future__ import annotations

from typing import Any

from vocabshard.kernels.triton_linear import forward, projection_id
from vocabshard.kernels.triton_logits import logits_backward, logits_forward


def backward(*args: Any, **options: Any) -> Any:
    raise NotImplementedError(
        "the Triton backend has no backward in this version; score under torch.no_grad(), or use another backend"
    )


__all__ = ["backward", "forward", "logits_backward", "logits_forward", "projection_id"]
