"""The Hopper kernels: projection `hopper-k16` for bf16 and fp16, `fma-chain` for fp32, any shape and strides.

Tensors live on one GPU of compute capability 9.0; N rows, D hidden size, V_local columns. Everything is enqueued on the
caller's stream of that GPU, without a synchronisation; scratch memory comes from torch's allocator. Which kernel runs
is a pure function of shape and strides and never changes a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.contract import check_constants
from vocabshard.kernels.cuda_logits import (
    logits_backward,
    logits_backward_upstream,
    logits_forward,
    logits_rows,
    logits_scores,
)
from vocabshard.kernels.problem import LocalProblem
from vocabshard.kernels.problem import keeps_nothing as kept_bytes_per_row
from vocabshard.kernels.sm90_backward import backward, row_grads
from vocabshard.kernels.sm90_inputs import ELEMENTS, for_tma, plain_strides, readable_by_tma
from vocabshard.partials import new_records

check_constants(_C.contract())

PATHS: dict[str, int] = _C.SM90_PATHS
CONTINUES_CHAIN = (torch.bfloat16, torch.float16, torch.float32)


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    *,
    want_logits: bool = False,
    path: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """hidden [N, D] and weight [V_local, D] of one dtype, any strides -> records int64 [R, N], logits fp32 or None.

    target_ids int64 [N] are global; inv_temperature is None, a float or fp32 [N]; both tensors contiguous. The logits
    [N, V_local] are those before temperature, -inf in padding columns. `path` is for tests: a key of PATHS. The weight
    is never copied; hidden is where its strides alone keep the tensor copy engine from reading it.
    """
    rows, depth = hidden.shape
    columns = weight.shape[0]
    device = hidden.device
    hidden, weight = plain_strides(hidden), plain_strides(weight)
    if hidden.dtype != torch.float32 and path != "mma" and readable_by_tma(weight) and not readable_by_tma(hidden):
        hidden = for_tma(hidden)
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    per_row, scale = None, 1.0
    if isinstance(inv_temperature, Tensor):
        per_row = inv_temperature
    elif inv_temperature is not None:
        scale = inv_temperature
    records = new_records(rows, problem.entropy, device)
    logits = torch.empty(rows, columns, dtype=torch.float32, device=device) if want_logits else None
    call = _C.Sm90Forward(
        device=device.index,
        element=ELEMENTS[hidden.dtype],
        rows=rows,
        depth=depth,
        columns=columns,
        hidden=hidden.data_ptr(),
        hidden_row=hidden.stride(0),
        hidden_column=hidden.stride(1),
        weight=weight.data_ptr(),
        weight_row=weight.stride(0),
        weight_column=weight.stride(1),
        entropy=problem.entropy,
        path=PATHS[path],
    )
    workspace = torch.empty(call.plan()[1], dtype=torch.uint8, device=device)
    call.launch(
        target_ids=target_ids.data_ptr(),
        vocab_start=problem.vocab_start,
        valid=problem.valid,
        bias=0 if bias is None else bias.data_ptr(),
        bias_element=0 if bias is None else ELEMENTS[bias.dtype],
        row_inv_temperature=0 if per_row is None else per_row.data_ptr(),
        inv_temperature=scale,
        softcap=problem.softcap or 0.0,
        logits=0 if logits is None else logits.data_ptr(),
        logits_row=columns,
        records=records.data_ptr(),
        workspace=workspace.data_ptr(),
        stream=torch.cuda.current_stream(device).cuda_stream,
    )
    return records, logits


__all__ = [
    "backward",
    "forward",
    "kept_bytes_per_row",
    "logits_backward",
    "logits_backward_upstream",
    "logits_forward",
    "logits_rows",
    "logits_scores",
    "row_grads",
]
