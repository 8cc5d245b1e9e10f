"""Sampling on NVIDIA Hopper over a block of fp32 logits: what kernels/sampling_torch.py has, with its bytes, in CUDA.

A cluster of thread blocks keeps a whole row in shared memory, so that a program's cut, a token, the truncated record
and the best columns take one read of the logits and one launch. For the usual programs (a top_p, or a top_k of few
before anything else) one or two other launches stream the rows. Where the row goes on at other ranks, histograms are
made by a kernel of their own, to be added over the group. Everything is enqueued on the caller's stream, without a
synchronisation. logits [N, V_local] fp32 have column stride 1; V_local is at most 819,200 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels import sampling_torch
from vocabshard.kernels.problem import LocalProblem
from vocabshard.partials import new_records
from vocabshard.sampling import RADIX, Step

Scale = float | Tensor | None
I64 = torch.int64
STREAM_BYTES = 128 << 20  # that candidates for the last kept columns may take, at most


def _block(logits: Tensor, problem: LocalProblem, scale: Scale) -> dict[str, Any]:
    """What every call is given."""
    device = logits.device
    per_row, one = (scale.data_ptr(), 1.0) if isinstance(scale, Tensor) else (0, 1.0 if scale is None else scale)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return {
        "device": device.index,
        "stream": stream,
        "logits": logits.data_ptr(),
        "row_stride": logits.stride(0),
        "rows": logits.shape[0],
        "valid": problem.valid,
        "vocab_start": problem.vocab_start,
        "scales": per_row,
        "scale": one,
    }


def _rows(logits: Tensor, problem: LocalProblem, scale: Scale, **more: Any) -> None:
    given: dict[str, Any] = {
        name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in more.items() if x is not None
    }
    _C.sm90_sampling_rows(**_block(logits, problem, scale), **given)


def fits(problem: LocalProblem) -> bool:
    """Whether a cluster's shared memory holds a row."""
    return problem.valid <= _C.SAMPLING_COLUMNS


def _new(logits: Tensor, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=I64, device=logits.device)


def sampling_rows(
    logits: Tensor,
    problem: LocalProblem,
    scale: Scale,
    steps: Sequence[Step],
    given_cut: Tensor | None,
    target_ids: Tensor | None,
    uncut: Tensor,
    seed: int = 0,
    row_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows that are whole here: (cut int64 [N], tokens int64 [N], records int64 [4, N] of what is kept).

    Tokens are drawn where there are row_keys, else they are the targets. uncut [4, N]: the records without a cut, of
    any target; where nothing is cut they get the token's. None: not what one launch can do.
    """
    n = logits.shape[0]
    if not fits(problem) or len(steps) > _C.SAMPLING_STEPS or problem.entropy:
        return None
    there = given_cut is None and not steps
    cut, records = _new(logits, n), uncut if there else new_records(n, False, logits.device)
    drawn = None if row_keys is None else _new(logits, 3, n)
    workspace = None
    if steps and given_cut is None and n * _C.SAMPLING_STREAM_BYTES <= STREAM_BYTES:
        workspace = torch.empty(n * _C.SAMPLING_STREAM_BYTES, dtype=torch.uint8, device=logits.device)
    _rows(
        logits, problem, scale, whole=True, steps=[tuple(step) for step in steps], given_cut=given_cut, cut=cut,
        records=records, records_there=there, draw=row_keys is not None, seed=seed, row_keys=row_keys, drawn=drawn,
        target_ids=target_ids if row_keys is None else None, uncut=uncut, workspace=workspace,
    )  # fmt: skip
    tokens = target_ids if drawn is None else drawn[1]
    assert tokens is not None
    return cut, tokens, records


def records_of_kept(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: Scale,
    problem: LocalProblem,
    cut: Tensor,
) -> Tensor | None:
    """Records int64 [4, N] of the columns that `cut` keeps; None where a launch can't."""
    if not fits(problem) or problem.entropy or logits.dtype != torch.float32:
        return None
    records = new_records(logits.shape[0], False, logits.device)
    _rows(logits, problem, inv_temperature, given_cut=cut, target_ids=target_ids, records=records)
    return records


def sampling_maxima(logits: Tensor, problem: LocalProblem) -> Tensor:
    """Best places: kernels/sampling_torch.py's."""
    if not fits(problem):
        return sampling_torch.sampling_maxima(logits, problem)
    maxima = _new(logits, logits.shape[0])
    _rows(logits, problem, None, maxima=maxima)
    return maxima


def sampling_draw(
    logits: Tensor, problem: LocalProblem, scale: Scale, cut: Tensor, seed: int, row_keys: Tensor
) -> Tensor:
    """Winners of these columns: kernels/sampling_torch.py's."""
    if not fits(problem):
        return sampling_torch.sampling_draw(logits, problem, scale, cut, seed, row_keys)
    drawn = _new(logits, 3, logits.shape[0])
    _rows(logits, problem, scale, given_cut=cut, draw=True, seed=seed, row_keys=row_keys, drawn=drawn)
    return drawn


def sampling_best(logits: Tensor, problem: LocalProblem, n: int) -> Tensor:
    """The n best places: kernels/sampling_torch.py's."""
    if not fits(problem) or n > _C.SAMPLING_BEST:
        return sampling_torch.sampling_best(logits, problem, n)
    best = _new(logits, logits.shape[0], n)
    _rows(logits, problem, None, best_count=n, best=best)
    return best


def sampling_before(logits: Tensor, problem: LocalProblem, place: Tensor) -> Tensor:
    """How many places are better: kernels/sampling_torch.py's."""
    if not fits(problem):
        return sampling_torch.sampling_before(logits, problem, place)
    before = _new(logits, logits.shape[0])
    _rows(logits, problem, None, place=place, before=before)
    return before


def sampling_histogram(
    logits: Tensor,
    problem: LocalProblem,
    scale: Scale,
    k_max: Tensor,
    cut: Tensor,
    prefix: Tensor,
    level: int,
    want_mass: bool,
) -> Tensor:
    """Counts and masses by digit: kernels/sampling_torch.py's."""
    bins = 1 << RADIX[level][1]
    out = torch.zeros(1 + want_mass, logits.shape[0], bins, dtype=I64, device=logits.device)
    _C.sm90_sampling_histogram(
        **_block(logits, problem, scale),
        k_max=k_max.data_ptr(),
        cut=cut.data_ptr(),
        prefix=prefix.data_ptr(),
        level=level,
        counts=out[0].data_ptr(),
        masses=out[1].data_ptr() if want_mass else 0,
    )
    return out


def sampling_equal(logits: Tensor, problem: LocalProblem, order: Tensor, nth: Tensor) -> Tensor:
    """The nth column of an order: kernels/sampling_torch.py's."""
    out = _new(logits, logits.shape[0])
    block = _block(logits, problem, None)
    del block["scales"], block["scale"]
    _C.sm90_sampling_equal(**block, order=order.data_ptr(), nth=nth.data_ptr(), out=out.data_ptr())
    return out
