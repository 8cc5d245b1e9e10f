"""What the fp32 backward multiplies with: ascending chains of FMAs, so that no row depends on the others.

A block's logits come from the launch that the forward makes them with: the same chain, so the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels.blockwise import Products
from vocabshard.kernels.sm90_inputs import ELEMENTS, plain_strides

_NOTHING = _C.FoldRows(0, 0, True, 0, 0, 0, 0, 0, 0)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 [N, D] and [columns, D] of any strides -> [N, columns] with bias, before soft-cap and temperature.

    Their partials come along and are dropped.
    """
    rows, columns, device = hidden.shape[0], weight.shape[0], hidden.device
    logits = torch.empty(rows, columns, dtype=torch.float32, device=device)
    if logits.numel() == 0:
        return logits
    bias = None if bias is None else bias.contiguous()
    call = _C.Sm90Forward(
        device.index,
        ELEMENTS[torch.float32],
        rows,
        hidden.shape[1],
        columns,
        hidden.data_ptr(),
        hidden.stride(0),
        hidden.stride(1),
        weight.data_ptr(),
        weight.stride(0),
        weight.stride(1),
        False,
        _C.SM90_PATHS["fma"],
    )
    target_ids = torch.zeros(rows, dtype=torch.int64, device=device)
    workspace = torch.empty(call.plan()[1], dtype=torch.uint8, device=device)
    call.launch(
        torch.cuda.current_stream(device).cuda_stream,
        workspace.data_ptr(),
        target_ids.data_ptr(),
        0,
        columns,
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else ELEMENTS[bias.dtype],
        0,
        1.0,
        0.0,
        logits.data_ptr(),
        columns,
        0,
        _NOTHING,
    )
    return logits


def add_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    """to [M, C] goes on by a [M, K] @ b [K, C], element by element in ascending k; all fp32."""
    a, b = plain_strides(a), plain_strides(b)
    if 1 not in a.stride():
        a = a.contiguous()
    if b.stride(1) != 1:
        b = b.contiguous()
    _C.sm90_add_fma_product(
        device=to.device.index,
        rows=a.shape[0],
        depth=a.shape[1],
        columns=b.shape[1],
        a=a.data_ptr(),
        a_row=a.stride(0),
        a_column=a.stride(1),
        b=b.data_ptr(),
        b_row=b.stride(0),
        out=to.data_ptr(),
        out_row=to.stride(0),
        stream=torch.cuda.current_stream(to.device).cuda_stream,
    )


FMA_CHAIN = Products(logits_of, add_product)
