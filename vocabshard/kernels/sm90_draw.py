"""Tokens drawn in the epilogue of the Hopper forward: of all columns, at most 64 rows at a time, no logits in memory.

The tokens of sampling_torch.sampling_draw over the same logits, where no column is left out. hidden [N, D], weight
[V_local, D] of bf16 or fp16. What there is no such kernel for (N, strides, the first column) gives None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels.problem import DrawnRows, LocalProblem
from vocabshard.kernels.sm90_inputs import ELEMENTS, addressable, for_tma, strides

DRAWN_ROWS = 64  # at most
RECORD_WORDS_DRAWN = 6
_AUTO: int = _C.SM90_PATHS["auto"]
_NO_FOLD = _C.FoldRows(0, 0, True, 0, 0, 0, 0, 0, 0)

Operands = tuple[Tensor, Tensor, Tensor | None, float | Tensor | None]  # hidden, weight, bias, inv_temperature


def _launch(
    x: Operands,
    problem: LocalProblem,
    seed: int,
    row_keys: Tensor | None,
    records: int,
    fold: _C.FoldRows,
    tokens: int = 0,
    cut: int = 0,
) -> bool:
    """Whether it was enqueued: the results land where `records`, or with 0 `fold`, `tokens` and `cut`, say."""
    hidden, weight, bias, scale = x
    device, (rows, depth) = hidden.device, hidden.shape
    row, column = strides(hidden)
    if rows > DRAWN_ROWS or hidden.dtype == torch.float32 or problem.entropy:
        return False
    if not addressable(hidden.data_ptr(), row, column):
        hidden = for_tma(hidden)
        row, column = hidden.stride()
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    columns = weight.shape[0]
    call = _C.Sm90Forward(
        device.index, ELEMENTS[hidden.dtype], rows, depth, columns, hidden.data_ptr(), row, column, weight.data_ptr(),
        *strides(weight), False, _AUTO,
    )  # fmt: skip
    draw = _C.DrawRows(seed, 0 if row_keys is None else row_keys.data_ptr())
    if not call.draw(draw, problem.vocab_start, tokens, cut):
        return False
    per_row = isinstance(scale, Tensor)
    workspace = torch.empty(call.plan()[1], dtype=torch.uint8, device=device)
    call.launch(
        torch._C._cuda_getCurrentRawStream(device.index),
        workspace.data_ptr(),
        0,
        problem.vocab_start,
        problem.valid,
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else ELEMENTS[bias.dtype],
        scale.data_ptr() if per_row else 0,  # type: ignore[union-attr]
        1.0 if per_row or scale is None else scale,  # type: ignore[arg-type]
        problem.softcap or 0.0,
        0,
        columns,
        records,
        fold,
    )
    return True


def _new(rows: int, device: torch.device, want_lse: bool) -> DrawnRows:
    tokens, cut = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    logp = torch.empty(rows, dtype=torch.float32, device=device)
    return DrawnRows(tokens, cut, logp, torch.empty_like(logp) if want_lse else None)


def _fold(out: DrawnRows, ignore_index: int, real_vocab_size: int, invalid: str) -> _C.FoldRows:
    lse = 0 if out.lse is None else out.lse.data_ptr()
    return _C.FoldRows(ignore_index, real_vocab_size, invalid == "nan", out.logp.data_ptr(), lse, 0, 0, 0, 0)


def draw_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    seed: int,
    row_keys: Tensor | None,
    ignore_index: int,
    real_vocab_size: int,
    invalid: str,
    want_lse: bool = True,
) -> DrawnRows | None:
    """Of rows that are whole here. row_keys int64 [N], contiguous, or None: 0, 1, 2, ..."""
    out = _new(hidden.shape[0], hidden.device, want_lse)
    fold = _fold(out, ignore_index, real_vocab_size, invalid)
    x = (hidden, weight, bias, inv_temperature)
    done = _launch(x, problem, seed, row_keys, 0, fold, out.tokens.data_ptr(), out.cut.data_ptr())
    return out if done else None


def draw_records(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    seed: int,
    row_keys: Tensor | None,
) -> Tensor | None:
    """int64 [6, N]: the records without a target, the winners' arrivals (2^63 - 1: none) and their ids, with the bits
    of their y in the low half."""
    records = torch.empty(RECORD_WORDS_DRAWN, hidden.shape[0], dtype=torch.int64, device=hidden.device)
    x = (hidden, weight, bias, inv_temperature)
    return records if _launch(x, problem, seed, row_keys, records.data_ptr(), _NO_FOLD) else None


def fold_draws(
    gathered: Tensor, ignore_index: int, real_vocab_size: int, invalid: str, want_lse: bool = True
) -> DrawnRows:
    """int64 [W, 6, N] of all ranks: the first winner is drawn, and is the target."""
    device, (ranks, _, rows) = gathered.device, gathered.shape
    out = _new(rows, device, want_lse)
    fold = _fold(out, ignore_index, real_vocab_size, invalid)
    _C.sm90_fold_drawn(
        device.index, gathered.data_ptr(), ranks, rows, fold, out.tokens.data_ptr(), out.cut.data_ptr(),
        torch._C._cuda_getCurrentRawStream(device.index),
    )  # fmt: skip
    return out
