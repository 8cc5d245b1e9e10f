"""The Hopper kernels: projection `hopper-k16` for bf16 and fp16, `fma-chain` for fp32, any shape and strides.

Tensors live on one GPU of compute capability 9.0; N rows, D hidden size, V_local columns. Everything is enqueued on the
caller's stream of that GPU, without a synchronisation; scratch memory comes from torch's allocator. Which kernel runs
is a pure function of shape and strides and never changes a byte.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.contract import check_constants
from vocabshard.kernels import cuda_logits, sm90_backward, truncated
from vocabshard.kernels.cuda_logits import logits_backward, logits_backward_upstream, logits_rows, logits_scores
from vocabshard.kernels.problem import ORDINARY, GradPlan, KeptLogits, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.kernels.sm90_at_once import backward_upstream
from vocabshard.kernels.sm90_beside import Operands as TopkOperands
from vocabshard.kernels.sm90_beside import topk_forward, topk_places
from vocabshard.kernels.sm90_draw import DRAWN_ROWS, draw_records, draw_rows, fold_draws, sample_rows
from vocabshard.kernels.sm90_fma import FMA_CHAIN
from vocabshard.kernels.sm90_inputs import ELEMENTS, addressable, for_tma, strides
from vocabshard.kernels.sm90_kept import KEPT_ROWS, groups_of, kept_bytes_per_row, new_kept, why_not_kept
from vocabshard.kernels.sm90_sampling import (
    records_of_kept,
    sampling_before,
    sampling_best,
    sampling_draw,
    sampling_equal,
    sampling_histogram,
    sampling_maxima,
    sampling_rows,
)
from vocabshard.kernels.sm90_terms import row_grads
from vocabshard.kernels.sm90_topk import topk_finish, topk_fits, topk_rows, topk_scan
from vocabshard.partials import FoldedRows, new_records, target_logits

check_constants(_C.contract())

PATHS: dict[str, int] = _C.SM90_PATHS
_NO_FOLD = _C.FoldRows(0, 0, True, 0, 0, 0, 0, 0, 0)
_NOTHING_KEPT = _C.KeptRows(0, 0, 0, 0, 0, 0)
CONTINUES_CHAIN = (torch.bfloat16, torch.float16, torch.float32)
TAKES_CUT = ("forward", "forward_rows", "forward_scores", "backward", "logits_forward")


def _launch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    want_logits: bool,
    path: str,
    records: int,
    fold: _C.FoldRows,
    cut: Tensor | None = None,
    kept: _C.KeptRows = _NOTHING_KEPT,
) -> Tensor | None:
    """The logits, where wanted; the rest lands where `records`, or with 0 `fold`, says."""
    device = hidden.device
    rows, depth = hidden.shape
    columns = weight.shape[0]
    row, column = strides(hidden)
    weight_row, weight_column = strides(weight)
    by_tma = hidden.dtype != torch.float32 and path != "mma"
    if (
        by_tma
        and not addressable(hidden.data_ptr(), row, column)
        and addressable(weight.data_ptr(), weight_row, weight_column)
    ):
        hidden = for_tma(hidden)
        row, column = hidden.stride()
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    per_row, scale = 0, 1.0
    if isinstance(inv_temperature, Tensor):
        per_row = inv_temperature.data_ptr()
    elif inv_temperature is not None:
        scale = inv_temperature
    logits = torch.empty(rows, columns, dtype=torch.float32, device=device) if want_logits else None
    call = _C.Sm90Forward(
        device.index,
        ELEMENTS[hidden.dtype],
        rows,
        depth,
        columns,
        hidden.data_ptr(),
        row,
        column,
        weight.data_ptr(),
        weight_row,
        weight_column,
        problem.entropy,
        PATHS[path],
    )
    workspace = torch.empty(call.plan()[1], dtype=torch.uint8, device=device)
    call.launch(
        # the handle alone, as compilers for torch get it: making a Stream costs as much as the launch
        torch._C._cuda_getCurrentRawStream(device.index),
        workspace.data_ptr(),
        target_ids.data_ptr(),
        problem.vocab_start,
        problem.valid,
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else ELEMENTS[bias.dtype],
        per_row,
        scale,
        problem.softcap or 0.0,
        0 if logits is None else logits.data_ptr(),
        columns,
        records,
        fold,
        0 if cut is None else cut.data_ptr(),
        kept,
    )
    return logits


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    *,
    want_logits: bool = False,
    cut: Tensor | None = None,
    path: str = "auto",
    keep: KeptLogits | None = None,
) -> tuple[Tensor, Tensor | None]:
    """hidden [N, D] and weight [V_local, D] of one dtype, any strides -> records int64 [R, N], logits fp32 or None.

    target_ids int64 [N] are global; inv_temperature is None, a float or fp32 [N]; both tensors contiguous. The logits
    [N, V_local] are those before temperature, -inf in padding columns. Columns that `cut` int64 [N] leaves out
    (vocabshard/sampling.py) count as -inf. `path` is for tests: a key of PATHS. The weight is never copied; hidden is
    where its strides alone keep the tensor copy engine from reading it. `keep` (of new_kept) gets the leading rows,
    what `cut` leaves out as -inf; there must be no why_not_kept.
    """
    records = new_records(hidden.shape[0], problem.entropy, hidden.device)
    rows = _NOTHING_KEPT
    if keep is not None:
        codes, references, target_y = keep.tensors
        rows = _C.KeptRows(
            codes.data_ptr(),
            codes.stride(0),
            references.data_ptr(),
            references.stride(1),
            codes.shape[0],
            groups_of(problem.valid),
        )
    x = (hidden, weight, bias, target_ids, inv_temperature)
    logits = _launch(*x, problem, want_logits, path, records.data_ptr(), _NO_FOLD, cut, rows)
    if keep is not None:
        target_y.copy_(target_logits(records)[: target_y.shape[0]])
    return records, logits


def _folded(
    x: tuple[Tensor, Tensor, Tensor | None, Tensor, float | Tensor | None],
    problem: LocalProblem,
    ignore_index: int,
    real_vocab_size: int,
    invalid: str,
    want_logits: bool,
    outs: tuple[Tensor | None, ...],  # as FoldedRows has them; None: not wanted
    cut: Tensor | None,
) -> Tensor | None:
    fold = _C.FoldRows(
        ignore_index, real_vocab_size, invalid == "nan", *[0 if out is None else out.data_ptr() for out in outs]
    )
    return _launch(*x, problem, want_logits, "auto", 0, fold, cut)


def forward_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    ignore_index: int,
    real_vocab_size: int,
    invalid: str,
    *,
    want_logits: bool = False,
    cut: Tensor | None = None,
) -> tuple[FoldedRows, Tensor | None]:
    """The forward and the fold of a process alone, a launch fewer: the folded rows, and the logits where wanted."""
    rows, device = hidden.shape[0], hidden.device

    def new(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, dtype=dtype, device=device)

    folded = FoldedRows(new(), new(), new() if problem.entropy else None, new(torch.int32), new(), new())
    x = (hidden, weight, bias, target_ids, inv_temperature)
    return folded, _folded(x, problem, ignore_index, real_vocab_size, invalid, want_logits, folded, cut)


def forward_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    ignore_index: int,
    real_vocab_size: int,
    invalid: str,
    *,
    want_lse: bool,
    want_logits: bool = False,
    cut: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The same without a backward to come: logp, lse, entropy and logits as far as they are wanted, nothing else."""
    wanted = (True, want_lse, problem.entropy)
    logp, lse, entropy = (
        torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device) if want else None for want in wanted
    )
    assert logp is not None
    x, outs = (hidden, weight, bias, target_ids, inv_temperature), (logp, lse, entropy, None, None, None)
    logits = _folded(x, problem, ignore_index, real_vocab_size, invalid, want_logits, outs, cut)
    return logp, lse, entropy, logits


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    grads: RowGrads,
    needs: Needs,
    how: GradPlan = ORDINARY,
    *,
    cut: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """kernels/sm90_backward.py's; fp32 under a cut goes over blocks of logits, with products of FMA chains."""
    x = (hidden, weight, bias, target_ids, inv_temperature, problem, saved, grads, needs, how)
    if cut is None or hidden.dtype != torch.float32 or hidden.shape[0] * problem.valid == 0:
        return sm90_backward.backward(*x, cut=cut)
    this = sys.modules[__name__]
    return truncated.backward_by_blocks(*x, kernel=this, cut=cut, add_product=FMA_CHAIN.add_product)


def logits_forward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    rows: Tensor | None = None,
    *,
    cut: Tensor | None = None,
) -> Tensor:
    """kernels/cuda_logits.py's. Columns that `cut` int64 [N], which goes without rows=, leaves out count as -inf."""
    if cut is not None:
        records = records_of_kept(logits, target_ids, inv_temperature, problem, cut)
        if records is not None:
            return records
        logits = truncated.without_cut(logits, problem, cut)
    return cuda_logits.logits_forward(logits, target_ids, inv_temperature, problem, rows)


__all__ = [
    "DRAWN_ROWS",
    "KEPT_ROWS",
    "TopkOperands",
    "backward",
    "backward_upstream",
    "draw_records",
    "draw_rows",
    "fold_draws",
    "forward",
    "forward_rows",
    "forward_scores",
    "kept_bytes_per_row",
    "logits_backward",
    "logits_backward_upstream",
    "logits_forward",
    "logits_rows",
    "logits_scores",
    "new_kept",
    "row_grads",
    "sample_rows",
    "sampling_before",
    "sampling_best",
    "sampling_draw",
    "sampling_equal",
    "sampling_histogram",
    "sampling_maxima",
    "sampling_rows",
    "topk_finish",
    "topk_fits",
    "topk_forward",
    "topk_places",
    "topk_rows",
    "topk_scan",
    "why_not_kept",
]
