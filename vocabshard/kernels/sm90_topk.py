"""The best columns of each row, their log-probs and the target's rank on NVIDIA Hopper: few launches, no host time.

Everything is enqueued on the caller's stream, without a synchronisation. A place is an int64 (vocabshard/sampling.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels.problem import LocalProblem
from vocabshard.partials import Scores

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


class Top(NamedTuple):
    """What comes of a row's records and its best places."""

    rows: Scores
    ids: Tensor  # int64 [N, n], -1 where there are fewer columns
    logp: Tensor  # fp32 [N, n]
    rank: Tensor  # int64 [N], of the target, from 1; 0 where it is no column


def topk_finish(
    records: Tensor,
    best: Tensor,
    before: Tensor,
    target_ids: Tensor,
    scale: float | Tensor | None,
    cut: Tensor | None,
    rule: tuple[int, int, str],
) -> Top:
    """The fold of records [parts, R, N], and of best [W, N, n] and before [N]."""
    best = best.contiguous()
    records = records.contiguous()
    top, given = _start(records, best.shape[2], target_ids, scale, cut, rule)
    _C.sm90_topk_finish(best.data_ptr(), best.shape[0], before.data_ptr(), *given)
    return top


def topk_rows(
    logits: Tensor,
    problem: LocalProblem,
    n: int,
    records: Tensor,
    target_ids: Tensor,
    scale: float | Tensor | None,
    cut: Tensor | None,
    rule: tuple[int, int, str],
) -> Top:
    """topk_scan and topk_finish in one launch, of rows that are whole here; records [1, R, N]."""
    records = records.contiguous()
    top, given = _start(records, n, target_ids, scale, cut, rule)
    _C.sm90_topk_rows(logits.data_ptr(), logits.stride(0), problem.valid, problem.vocab_start, *given)
    return top


def _start(
    records: Tensor,
    n: int,
    target_ids: Tensor,
    scale: float | Tensor | None,
    cut: Tensor | None,
    rule: tuple[int, int, str],
) -> tuple[Top, tuple[Any, ...]]:
    """Room for the results, and the arguments that both launches begin with."""
    device, (parts, words, rows) = records.device, records.shape
    logp = torch.empty(rows, dtype=torch.float32, device=device)
    scores = Scores(logp, torch.empty_like(logp), torch.empty_like(logp) if words > 4 else None)
    top = Top(
        scores,
        torch.empty(rows, n, dtype=I64, device=device),
        torch.empty(rows, n, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=I64, device=device),
    )
    per_row, one = (scale.data_ptr(), 1.0) if isinstance(scale, Tensor) else (0, 1.0 if scale is None else scale)
    logp_at, lse_at, entropy_at = (0 if x is None else x.data_ptr() for x in scores)
    return top, (
        device.index,
        torch._C._cuda_getCurrentRawStream(device.index),
        records.data_ptr(),
        parts,
        rows,
        words > 4,
        n,
        target_ids.data_ptr(),
        per_row,
        one,
        0 if cut is None else cut.data_ptr(),
        top.ids.data_ptr(),
        top.logp.data_ptr(),
        top.rank.data_ptr(),
        _C.FoldRows(rule[0], rule[1], rule[2] == "nan", logp_at, lse_at, entropy_at, 0, 0, 0),
    )
