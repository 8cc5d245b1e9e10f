"""The CPU kernels of sampling_torch.py's functions: the same arguments, the same integers."""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard import sampling as S
from vocabshard.kernels.problem import LocalProblem


def _run() -> _C.CpuRun:
    return _C.CpuRun(torch.get_num_threads())


def _block(logits: Tensor, problem: LocalProblem, scale: float | Tensor | None = None) -> _C.SamplingBlock:
    rows, columns = logits.shape
    matrix = _C.Matrix(logits.data_ptr(), _C.F32, rows, columns, logits.stride(0), logits.stride(1))
    per_row = scale.data_ptr() if isinstance(scale, Tensor) else 0
    scalar = 1.0 if scale is None or isinstance(scale, Tensor) else scale
    return _C.SamplingBlock(matrix, problem.vocab_start, problem.valid, per_row, scalar)


def _new(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def sampling_maxima(logits: Tensor, problem: LocalProblem) -> Tensor:
    """The best place, int64 [N]."""
    out = _new(logits.shape[0])
    _C.cpu_sampling_maxima(_block(logits, problem), out.data_ptr(), _run())
    return out


def sampling_histogram(
    logits: Tensor,
    problem: LocalProblem,
    scale: float | Tensor | None,
    k_max: Tensor,
    cut: Tensor,
    prefix: Tensor,
    level: int,
    want_mass: bool,
) -> Tensor:
    """Counts and masses by digit, int64 [2, N, bins]."""
    out = _new(1 + want_mass, logits.shape[0], 1 << S.RADIX[level][1])
    masses = out[1].data_ptr() if want_mass else 0
    _C.cpu_sampling_histogram(
        _block(logits, problem, scale), k_max.data_ptr(), cut.data_ptr(), prefix.data_ptr(), level,
        out[0].data_ptr(), masses, _run(),
    )  # fmt: skip
    return out


def sampling_floor(logits: Tensor, problem: LocalProblem, scale: float | Tensor | None, threshold: Tensor) -> Tensor:
    """Smallest order with y >= threshold, int64 [N]."""
    out = _new(logits.shape[0])
    _C.cpu_sampling_floor(_block(logits, problem, scale), threshold.data_ptr(), out.data_ptr(), _run())
    return out


def sampling_equal(logits: Tensor, problem: LocalProblem, order: Tensor, nth: Tensor) -> Tensor:
    """Id of the nth column of that order, int64 [N]."""
    out = _new(logits.shape[0])
    _C.cpu_sampling_equal(_block(logits, problem), order.data_ptr(), nth.data_ptr(), out.data_ptr(), _run())
    return out


def sampling_draw(
    logits: Tensor, problem: LocalProblem, scale: float | Tensor | None, cut: Tensor, seed: int, row_keys: Tensor
) -> Tensor:
    """Arrival, id and order of the winner, int64 [3, N]."""
    out = _new(3, logits.shape[0])
    _C.cpu_sampling_draw(
        _block(logits, problem, scale), cut.data_ptr(), seed, row_keys.data_ptr(), out[0].data_ptr(),
        out[1].data_ptr(), out[2].data_ptr(), _run(),
    )  # fmt: skip
    return out


def sampling_best(logits: Tensor, problem: LocalProblem, n: int) -> Tensor:
    """The best places, int64 [N, n]."""
    out = _new(logits.shape[0], n)
    _C.cpu_sampling_best(_block(logits, problem), n, out.data_ptr(), _run())
    return out


def sampling_before(logits: Tensor, problem: LocalProblem, place: Tensor) -> Tensor:
    """How many places are better, int64 [N]."""
    out = _new(logits.shape[0])
    _C.cpu_sampling_before(_block(logits, problem), place.data_ptr(), out.data_ptr(), _run())
    return out


__all__ = [
    "sampling_before",
    "sampling_best",
    "sampling_draw",
    "sampling_equal",
    "sampling_floor",
    "sampling_histogram",
    "sampling_maxima",
]
