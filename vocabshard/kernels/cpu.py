"""The CPU kernels: projection `fma-chain`, every instruction set and thread count the same bytes.

Tensors live on the CPU; N rows, D hidden size, V_local columns. Nothing of size N * V is held: scratch memory is at
most 64 MiB beyond inputs and outputs, whatever N and V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.contract import check_constants
from vocabshard.kernels.cpu_sampling import (
    sampling_before,
    sampling_best,
    sampling_draw,
    sampling_equal,
    sampling_floor,
    sampling_histogram,
    sampling_maxima,
)
from vocabshard.kernels.problem import (
    ORDINARY,
    GradPlan,
    KeptLogits,
    LocalProblem,
    Needs,
    RowGrads,
    SavedRows,
)
from vocabshard.partials import new_records

check_constants(_C.contract())

DTYPES = {torch.float32: _C.F32, torch.bfloat16: _C.BF16, torch.float16: _C.F16}
_ABSENT = _C.Matrix()


def _run() -> _C.CpuRun:
    return _C.CpuRun(torch.get_num_threads())


def _matrix(x: Tensor) -> _C.Matrix:
    return _C.Matrix(x.data_ptr(), DTYPES[x.dtype], x.shape[0], x.shape[1], x.stride(0), x.stride(1))


def _optional(x: Tensor | None) -> _C.Matrix:
    """A contiguous gradient of one or two dimensions, or nothing."""
    if x is None:
        return _ABSENT
    return _matrix(x if x.dim() == 2 else x[:, None])


def _vector(x: Tensor | None) -> _C.Vector:
    return _C.Vector() if x is None else _C.Vector(x.data_ptr(), DTYPES[x.dtype], x.stride(0))


def _rows(target_ids: Tensor, inv_temperature: float | Tensor | None, cut: Tensor | None = None) -> _C.RowInputs:
    where = 0 if cut is None else cut.data_ptr()
    if isinstance(inv_temperature, Tensor):
        return _C.RowInputs(target_ids.data_ptr(), inv_temperature.data_ptr(), cut=where)
    return _C.RowInputs(target_ids.data_ptr(), 0, 1.0 if inv_temperature is None else inv_temperature, where)


def _problem(problem: LocalProblem) -> _C.Problem:
    return _C.Problem(problem.vocab_start, problem.valid, problem.softcap or 0.0, problem.entropy)


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


class _Gradients:
    """Row gradients as the kernels want them; keeps contiguous copies alive as long as it lives."""

    def __init__(self, problem: LocalProblem, saved: SavedRows, grads: RowGrads) -> None:
        rows = saved.lse2_frac.shape[0]
        entropy: list[Tensor | None] = [saved.entropy, grads.entropy] if problem.entropy else [None, None]
        if problem.entropy and (entropy[0] is None or entropy[1] is None):  # nothing flows through the entropy
            entropy = [torch.zeros(rows), torch.zeros(rows)]
        self.tensors = [
            None if x is None else x.contiguous()
            for x in (saved.lse2_int, saved.lse2_frac, entropy[0], grads.target, grads.softmax, entropy[1])
        ]
        self.struct = _C.RowGradients(*map(_pointer, self.tensors))


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    *,
    want_logits: bool = False,
    keep: KeptLogits | None = None,
    cut: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """hidden [N, D] and weight [V_local, D] of one dtype, any strides -> records int64 [R, N], logits fp32 or None.

    target_ids int64 [N] are global; inv_temperature is None, a float or fp32 [N]; both tensors contiguous. The logits
    [N, V_local] are those before temperature and cut, -inf in padding columns. `keep` gets the chains of its rows in
    fp32. cut int64 [N], contiguous: what a truncation keeps (vocabshard/sampling.py), here and below.
    """
    records = new_records(hidden.shape[0], problem.entropy, hidden.device)
    logits = torch.empty(hidden.shape[0], weight.shape[0]) if want_logits else None
    _C.cpu_linear_forward(
        _matrix(hidden),
        _matrix(weight),
        _vector(bias),
        _rows(target_ids, inv_temperature, cut),
        _problem(problem),
        records.data_ptr(),
        _optional(logits),
        _kept(keep),
        _run(),
    )
    return records, logits


TAKES_CUT = ("forward", "backward", "logits_forward", "logits_backward")
# grad_hidden goes on from given accumulators as one ascending chain
CONTINUES_CHAIN = (torch.float32, torch.bfloat16, torch.float16)


def kept_bytes_per_row(columns: int, dtype: torch.dtype) -> int:
    """The fp32 chains, so that a backward gives the same bytes with them and without."""
    return 4 * columns


def new_kept(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> KeptLogits:
    """Room for the logits of `rows` rows."""
    return KeptLogits((torch.empty(rows, columns),))


def _kept(kept: KeptLogits | None) -> _C.Matrix:
    return _ABSENT if kept is None else _matrix(kept.tensors[0])


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
    """Gradients of this rank: hidden fp32 [N, D], weight [V_local, D] and bias [V_local] in their dtypes, or None.

    Logits are made again block by block, but for rows that were kept. Sums are fp32 (bias: fp64) in an order that
    depends on D and on the rows that have a gradient alone, and are rounded once. Accumulators that are given go on as
    one FMA chain over the columns.
    """
    grad_hidden = None
    if needs.hidden:
        grad_hidden = torch.empty(hidden.shape) if how.grad_hidden is None else how.grad_hidden
    grad_weight = None
    if needs.weight:
        grad_weight = torch.empty(weight.shape, dtype=weight.dtype) if how.main_grad is None else how.main_grad
    grad_bias = torch.empty(bias.shape, dtype=bias.dtype) if bias is not None and needs.bias else None
    gradients = _Gradients(problem, saved, grads)
    _C.cpu_linear_backward(
        _matrix(hidden),
        _matrix(weight),
        _vector(bias),
        _rows(target_ids, inv_temperature, cut),
        _problem(problem),
        gradients.struct,
        _optional(grad_hidden),
        _optional(grad_weight),
        _optional(grad_bias),
        _C.GradientPlan(how.grad_hidden is not None, how.main_grad is not None, _kept(how.kept)),
        _run(),
    )
    if grad_hidden is not None:  # the products ran together: nothing is left to hide
        how.announce(grad_hidden)
    return grad_hidden, None if how.main_grad is not None else grad_weight, grad_bias


def logits_forward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    rows: Tensor | None = None,
    *,
    cut: Tensor | None = None,
) -> Tensor:
    """logits [N_rows, V_local] of column stride 1 -> records int64 [R, M]; output row m reads row rows[m], or m."""
    outputs = target_ids.shape[0]
    records = new_records(outputs, problem.entropy, logits.device)
    _C.cpu_logits_forward(
        _matrix(logits),
        _pointer(rows),
        outputs,
        _rows(target_ids, inv_temperature, cut),
        _problem(problem),
        records.data_ptr(),
        _run(),
    )
    return records


def logits_backward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    grads: RowGrads,
    out: Tensor,
    rows: Tensor | None = None,
    *,
    cut: Tensor | None = None,
) -> None:
    """Writes all of out [N_rows, V_local], the gradient of the logits; it may be the logits themselves.

    Rows that no output row read become zero; several readers add up in fp32, in ascending order of the output rows.
    """
    gradients = _Gradients(problem, saved, grads)
    _C.cpu_logits_backward(
        _matrix(logits),
        _pointer(rows),
        target_ids.shape[0],
        _rows(target_ids, inv_temperature, cut),
        _problem(problem),
        gradients.struct,
        _matrix(out),
        _run(),
    )


__all__ = [
    "CONTINUES_CHAIN",
    "TAKES_CUT",
    "backward",
    "forward",
    "kept_bytes_per_row",
    "logits_backward",
    "logits_forward",
    "new_kept",
    "sampling_before",
    "sampling_best",
    "sampling_draw",
    "sampling_equal",
    "sampling_floor",
    "sampling_histogram",
    "sampling_maxima",
]
