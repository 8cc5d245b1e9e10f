"""Kernels over logits that exist, for NVIDIA GPUs: one read in the forward, one read and one write in the backward.

Tensors live on one GPU; logits are [N_rows, V_local] of column stride 1 and any row stride, fp32, bf16 or fp16. M
output rows read them: rows [M] says which, or None: row m. Everything is enqueued on the caller's stream of that GPU,
without a synchronisation. The workspace is half a MiB a stream and stays; nothing else is allocated beside outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.contract import check_constants
from vocabshard.kernels.problem import LocalProblem, RowGrads, SavedRows, Upstream
from vocabshard.partials import FoldedRows, new_records

check_constants(_C.contract())

_DTYPES: dict[torch.dtype, int] = {torch.float32: _C.F32, torch.bfloat16: _C.BF16, torch.float16: _C.F16}
_NO_UPSTREAM = _C.LogitsUpstream()

# By device and stream: launches of one stream follow each other and leave the workspace as they found it.
_workspaces: dict[tuple[int, int], Tensor] = {}


def _workspace(device: torch.device, stream: int) -> Tensor:
    workspace = None if torch.cuda.is_current_stream_capturing() else _workspaces.get((device.index, stream))
    if workspace is None:
        workspace = _new_workspace(device)
        # a graph gets its own: replays of two graphs may run at the same time
        if not torch.cuda.is_current_stream_capturing():
            _workspaces[device.index, stream] = workspace
    return workspace


def _new_workspace(device: torch.device) -> Tensor:
    size, zeroed = _C.cuda_logits_workspace(device.index)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    workspace[:zeroed].zero_()
    return workspace


def _stream(device: torch.device) -> int:
    """The handle alone, as compilers for torch get it: making a Stream costs as much as the launch."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def _row_stride(x: Tensor) -> int:
    """Of a single row it says nothing, and must not make it look unaligned."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _temperature(inv_temperature: float | Tensor | None) -> tuple[int, float]:
    """Pointer to one factor a row or 0, and the factor of all."""
    if isinstance(inv_temperature, Tensor):
        return inv_temperature.data_ptr(), 1.0
    return 0, 1.0 if inv_temperature is None else inv_temperature


def _forward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    rows: Tensor | None,
    records: Tensor | None,
    outs: tuple[Tensor | None, ...] = (None,) * 6,  # as FoldedRows has them
    ignore_index: int = 0,
    real_vocab_size: int = 0,
    invalid_is_nan: bool = True,
) -> None:
    device = logits.device
    stream = _stream(device)
    per_row, scalar = _temperature(inv_temperature)
    _C.cuda_logits_forward(
        device.index,
        stream,
        _workspace(device, stream).data_ptr(),
        logits.data_ptr(),
        _DTYPES[logits.dtype],
        logits.shape[0],
        logits.shape[1],
        _row_stride(logits),
        0 if rows is None else rows.data_ptr(),
        target_ids.shape[0],
        target_ids.data_ptr(),
        per_row,
        scalar,
        problem.vocab_start,
        problem.valid,
        problem.entropy,
        0 if records is None else records.data_ptr(),
        *[0 if out is None else out.data_ptr() for out in outs],
        ignore_index,
        real_vocab_size,
        invalid_is_nan,
    )


def logits_forward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    rows: Tensor | None = None,
) -> Tensor:
    """logits [N_rows, V_local] -> records int64 [R, M]; target_ids int64 [M] are global."""
    records = new_records(target_ids.shape[0], problem.entropy, logits.device)
    _forward(logits, target_ids, inv_temperature, problem, rows, records)
    return records


def logits_rows(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    rows: Tensor | None,
    ignore_index: int,
    real_vocab_size: int,
    invalid: str,
) -> FoldedRows:
    """The forward and the fold of unsharded logits in one launch. An index in rows that is out of range gives NaN."""
    outputs, device = target_ids.shape[0], logits.device

    def new(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(outputs, dtype=dtype, device=device)

    folded = FoldedRows(new(), new(), new() if problem.entropy else None, new(torch.int32), new(), new())
    _forward(
        logits, target_ids, inv_temperature, problem, rows, None, folded, ignore_index, real_vocab_size,
        invalid == "nan",
    )  # fmt: skip
    return folded


def logits_scores(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    rows: Tensor | None,
    ignore_index: int,
    real_vocab_size: int,
    invalid: str,
    want_lse: bool,
    want_maximum: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The same without a backward to come: logp, lse, entropy and maximum as far as they are wanted, nothing else."""
    wanted = (True, want_lse, problem.entropy, want_maximum)
    logp, lse, entropy, maximum = (
        torch.empty(target_ids.shape[0], dtype=torch.float32, device=logits.device) if want else None for want in wanted
    )
    assert logp is not None
    # what is not wanted lands in logp's memory, before logp does
    outs = (logp, logp if lse is None else lse, entropy, logp, logp, logp if maximum is None else maximum)
    _forward(
        logits, target_ids, inv_temperature, problem, rows, None, outs, ignore_index, real_vocab_size,
        invalid == "nan",
    )  # fmt: skip
    return logp, lse, entropy, maximum


def _readers(rows: Tensor, logits_rows: int) -> tuple[Tensor, Tensor]:
    """Which output rows read each row of the logits: order[first[n]] ... order[first[n + 1] - 1], ascending."""
    ascending, order = torch.sort(rows, stable=True)
    bounds = torch.arange(logits_rows + 1, dtype=torch.int64, device=rows.device)
    return torch.searchsorted(ascending, bounds), order


def _backward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    gradients: _C.RowGradients,
    upstream: _C.LogitsUpstream,
    out: Tensor,
    rows: Tensor | None,
) -> None:
    device = logits.device
    per_row, scalar = _temperature(inv_temperature)
    first, order = (None, None) if rows is None else _readers(rows, logits.shape[0])
    _C.cuda_logits_backward(
        device.index,
        _stream(device),
        logits.data_ptr(),
        _DTYPES[logits.dtype],
        logits.shape[0],
        logits.shape[1],
        _row_stride(logits),
        out.data_ptr(),
        _row_stride(out),
        0 if first is None else first.data_ptr(),
        0 if order is None else order.data_ptr(),
        target_ids.data_ptr(),
        per_row,
        scalar,
        problem.vocab_start,
        problem.valid,
        gradients,
        upstream,
    )


def logits_backward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    grads: RowGrads,
    out: Tensor,
    rows: Tensor | None = None,
) -> None:
    """Writes all of out [N_rows, V_local], the gradient of the logits; it may be the logits themselves.

    Rows that no output row read become zero; several readers add up in fp32, in ascending order of the output rows.
    """
    lse2_int, lse2_frac, row_entropy = saved
    target, softmax, entropy = grads
    flows = row_entropy is not None and entropy is not None
    gradients = _C.RowGradients(
        lse2_int.data_ptr(),
        lse2_frac.data_ptr(),
        row_entropy.data_ptr() if row_entropy is not None and flows else 0,
        target.data_ptr(),
        softmax.data_ptr(),
        entropy.data_ptr() if entropy is not None and flows else 0,
    )
    _backward(logits, target_ids, inv_temperature, problem, gradients, _NO_UPSTREAM, out, rows)


def logits_backward_upstream(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    upstream: Upstream,
    out: Tensor,
    rows: Tensor | None,
    ignore_index: int,
    real_vocab_size: int,
) -> None:
    """The same from upstream gradients as they come, without a kernel of their own to turn them into RowGrads."""
    lse2_int, lse2_frac, row_entropy = saved
    logp, lse, entropy = upstream
    if row_entropy is None:
        entropy = None
    given = [(0, 1) if t is None else (t.data_ptr(), t.stride(0)) for t in (logp, lse, entropy)]
    gradients = _C.RowGradients(
        lse2_int.data_ptr(), lse2_frac.data_ptr(), 0 if row_entropy is None else row_entropy.data_ptr(), 0, 0, 0
    )
    struct = _C.LogitsUpstream(*given[0], *given[1], *given[2], ignore_index, real_vocab_size)
    _backward(logits, target_ids, inv_temperature, problem, gradients, struct, out, rows)
