"""fp32 logits of a block, by the launch that the forward makes them with: the same chain, so the same bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels.sm90_inputs import ELEMENTS
from vocabshard.partials import new_records


def fma_chain_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 [N, D] and [columns, D] of any strides -> [N, columns] with bias, before soft-cap and temperature.

    The records of the block come along and are dropped.
    """
    rows, columns, device = hidden.shape[0], weight.shape[0], hidden.device
    logits = torch.empty(rows, columns, dtype=torch.float32, device=device)
    if logits.numel() == 0:
        return logits
    bias = None if bias is None else bias.contiguous()
    call = _C.Sm90Forward(
        device=device.index,
        element=ELEMENTS[torch.float32],
        rows=rows,
        depth=hidden.shape[1],
        columns=columns,
        hidden=hidden.data_ptr(),
        hidden_row=hidden.stride(0),
        hidden_column=hidden.stride(1),
        weight=weight.data_ptr(),
        weight_row=weight.stride(0),
        weight_column=weight.stride(1),
        entropy=False,
        path=_C.SM90_PATHS["fma"],
    )
    target_ids = torch.zeros(rows, dtype=torch.int64, device=device)
    records = new_records(rows, False, device)
    workspace = torch.empty(call.plan()[1], dtype=torch.uint8, device=device)
    call.launch(
        target_ids=target_ids.data_ptr(),
        vocab_start=0,
        valid=columns,
        bias=0 if bias is None else bias.data_ptr(),
        bias_element=0 if bias is None else ELEMENTS[bias.dtype],
        row_inv_temperature=0,
        inv_temperature=1.0,
        softcap=0.0,
        logits=logits.data_ptr(),
        logits_row=columns,
        records=records.data_ptr(),
        workspace=workspace.data_ptr(),
        stream=torch.cuda.current_stream(device).cuda_stream,
    )
    return logits
