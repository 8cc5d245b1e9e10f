"""The best columns of each row, their log-probs and the target's rank on NVIDIA Hopper: few launches, no host time.

Everything is enqueued on the caller's stream, without a synchronisation. A place is an int64 (vocabshard/sampling.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels.problem import LocalProblem
from vocabshard.partials import FoldedRows

I64 = torch.int64


def topk_fits(columns: int, n: int) -> bool:
    """Whether topk_scan has the memory for so many."""
    return _C.sm90_topk_fits(columns, n)


def topk_scan(
    logits: Tensor, problem: LocalProblem, n: int, target_ids: Tensor, place: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of fp32 logits [N, V_local]: the n best places int64 [N, n], and how many are better than the target's [N].

    place int64 [N]: the targets', where they may lie on other ranks.
    """
    device, rows = logits.device, logits.shape[0]
    best, before = torch.empty(rows, n, dtype=I64, device=device), torch.empty(rows, dtype=I64, device=device)
    _C.sm90_topk_scan(
        device.index,
        torch._C._cuda_getCurrentRawStream(device.index),
        logits.data_ptr(),
        logits.stride(0),
        rows,
        problem.valid,
        problem.vocab_start,
        n,
        target_ids.data_ptr(),
        0 if place is None else place.data_ptr(),
        best.data_ptr(),
        before.data_ptr(),
    )
    return best, before


def topk_finish(
    records: Tensor,
    best: Tensor,
    before: Tensor,
    target_ids: Tensor,
    scale: float | Tensor | None,
    cut: Tensor | None,
    ignore_index: int,
    real_vocab_size: int,
    invalid: str,
) -> tuple[FoldedRows, Tensor, Tensor, Tensor]:
    """The fold of records [parts, R, N], and of best [W, N, n] and before [N]: ids int64 [N, n], log-probs, ranks."""
    records, best = records.contiguous(), best.contiguous()
    device, (ranks, rows, n), (parts, words, _) = records.device, best.shape, records.shape
    folded = _new_rows(rows, words > 4, device)
    ids, logp = torch.empty(rows, n, dtype=I64, device=device), torch.empty(rows, n, device=device)
    rank = torch.empty(rows, dtype=I64, device=device)
    per_row, one = (scale.data_ptr(), 1.0) if isinstance(scale, Tensor) else (0, 1.0 if scale is None else scale)
    _C.sm90_topk_finish(
        device.index,
        torch._C._cuda_getCurrentRawStream(device.index),
        records.data_ptr(),
        parts,
        rows,
        words > 4,
        best.data_ptr(),
        ranks,
        n,
        before.data_ptr(),
        target_ids.data_ptr(),
        per_row,
        one,
        0 if cut is None else cut.data_ptr(),
        ids.data_ptr(),
        logp.data_ptr(),
        rank.data_ptr(),
        _C.FoldRows(
            ignore_index, real_vocab_size, invalid == "nan", *[0 if x is None else x.data_ptr() for x in folded]
        ),
    )
    return folded, ids, logp, rank


def _new_rows(rows: int, entropy: bool, device: torch.device) -> FoldedRows:
    def new(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, dtype=dtype, device=device)

    return FoldedRows(new(), new(), new() if entropy else None, new(torch.int32), new(), new())
