"""The two matrix products of the Hopper backward: what dlogits send to hidden and to the weight.

An element of either is one ascending chain of the tensor core's k = 16 steps in an fp32 accumulator, from zero or from
what memory holds. So a row of grad_hidden depends on that row of dlogits and the weight alone, not on the other rows,
the tile or the launch, and not on how the columns were cut at multiples of 16 when each block goes on from the one
before; grad_weight does not depend on how rows were cut so.

bf16 and fp16. What the tensor copy engine cannot address (D not a multiple of 8, odd strides, bases off 16 bytes) is
copied to where it can: the same bytes, without a promise of speed. Everything is enqueued on the current stream of the
tensors' device; nothing synchronises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import _C

_ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_WIDTH = 8


def _width(columns: int) -> int:
    return -(-columns // _WIDTH) * _WIDTH


def _fits(x: Tensor) -> bool:
    """Rows on 16 bytes, whole groups of 8 columns apart."""
    row, column = x.stride()
    return column == 1 and row >= x.shape[1] and row % _WIDTH == 0 and x.data_ptr() % 16 == 0


def _operand(x: Tensor, width: int) -> Tensor:
    """x, or a copy of it padded with columns of zeros."""
    rows, columns = x.shape
    if columns == width and rows > 0 and _fits(x):
        return x
    copy = x.new_zeros(rows, width)
    copy[:, :columns] = x
    return copy


def _rows(x: Tensor) -> Tensor:
    """x, any number of columns, or a copy of it with rows on 16 bytes."""
    return x if x.numel() > 0 and _fits(x) else _operand(x, _width(x.shape[1]))


def _sum(x: Tensor, width: int) -> Tensor:
    """x, or a place of its type beside it that can be written 16 bytes at a time."""
    return x if x.shape[1] == width and _fits(x) else x.new_empty(x.shape[0], width)


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


def grad_hidden(
    dlogits: Tensor,
    weight: Tensor,
    grad: Tensor,
    *,
    go_on: bool,
    add: bool = False,
    row_active: Tensor | None = None,
) -> None:
    """grad [N, D] = (grad if go_on else 0) + dlogits [N, Vb] @ weight [Vb, D]; operands of one 16-bit type.

    grad is fp32, or without go_on of the operands' type and then rounded once.

    Columns of dlogits that are to be left out, padding whose weights may be NaN for one, must be cut off by the caller:
    zeros there are multiplied. With go_on the chain of what is in grad continues; with add, instead, one from zero
    is added to it, with one rounding. row_active: uint8 [N], contiguous;
    where it is 0, the row of grad stays as it is, without go_on and add it becomes 0, whatever the weight holds.
    """
    rows, columns = dlogits.shape
    depth = weight.shape[1]
    width = _width(depth)
    if columns == 0:
        if not go_on and not add:
            grad.zero_()
        return
    dlogits, weight = _rows(dlogits), _operand(weight, width)
    out = _sum(grad, width)
    if out is not grad and (go_on or add):
        out[:, :depth] = grad
    _C.sm90_grad_hidden(
        device=grad.device.index,
        element=_ELEMENTS[weight.dtype],
        rows=rows,
        depth=width,
        columns=columns,
        dlogits=dlogits.data_ptr(),
        dlogits_row=dlogits.stride(0),
        weight=weight.data_ptr(),
        weight_row=weight.stride(0),
        row_active=0 if row_active is None else row_active.data_ptr(),
        grad=out.data_ptr(),
        grad_row=out.stride(0),
        grad_element=_ELEMENTS[grad.dtype],
        go_on=go_on,
        add=add,
        stream=_stream(grad),
    )
    if out is not grad:
        grad.copy_(out[:, :depth])


def grad_weight(
    dlogits: Tensor,
    hidden: Tensor,
    grad: Tensor,
    *,
    go_on_from: Tensor | None = None,
    add: bool = False,
    row_mask: Tensor | None = None,
    turn: _C.Sm90DlogitsKept | None = None,
) -> None:
    """grad [Vb, D] = (go_on_from or 0) + dlogits [N, Vb]^T @ hidden [N, D]; operands of one 16-bit type.

    grad is fp32, or of the operands' type and then rounded once. add: grad, fp32, gets the sum added to what is there,
    with one rounding. go_on_from: fp32 [Vb, D], the chain of earlier rows, may be grad itself.

    Zeros of dlogits are multiplied, so a row of hidden may be NaN or infinite beside them only if row_mask names it:
    64-bit integers [ceil(N / 64)], contiguous; the row 64 b + i whose bit i of word b is set counts as zeros.

    turn: kept logits of other columns, bf16, that warps without other work turn into dlogits where they lie; not with
    go_on_from.
    """
    rows, columns = dlogits.shape
    depth = hidden.shape[1]
    width = _width(depth)
    if rows == 0:
        if not add:
            _ = grad.zero_() if go_on_from is None else grad.copy_(go_on_from)
        elif go_on_from is not None:
            grad += go_on_from
        return
    dlogits, hidden = _rows(dlogits), _operand(hidden, width)
    out, init = _sum(grad, width), None
    if out is not grad and add:
        out[:, :depth] = grad
    if go_on_from is not None:
        init = out if go_on_from is grad else _sum(go_on_from, width)
        if init is not go_on_from:
            init[:, :depth] = go_on_from
    _C.sm90_grad_weight(
        device=grad.device.index,
        element=_ELEMENTS[hidden.dtype],
        rows=rows,
        depth=width,
        columns=columns,
        dlogits=dlogits.data_ptr(),
        dlogits_row=dlogits.stride(0),
        hidden=hidden.data_ptr(),
        hidden_row=hidden.stride(0),
        row_mask=0 if row_mask is None else row_mask.data_ptr(),
        init=0 if init is None else init.data_ptr(),
        init_row=0 if init is None else init.stride(0),
        grad=out.data_ptr(),
        grad_row=out.stride(0),
        grad_element=_ELEMENTS[grad.dtype],
        add=add,
        stream=_stream(grad),
        turn=turn,
    )
    if out is not grad:
        grad.copy_(out[:, :depth])


__all__ = ["grad_hidden", "grad_weight"]
