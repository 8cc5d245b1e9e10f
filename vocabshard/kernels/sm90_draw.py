"""Tokens of whole calls on Hopper, with little of the host's time.

draw_rows, draw_records: in the forward's epilogue, of all columns, at most 64 rows at a time, no logits in memory. The
tokens of sampling_torch.sampling_draw over the same logits, where no column is left out. hidden [N, D], weight
[V_local, D] of bf16 or fp16. What there is no such kernel for (N, strides, the first column) gives None.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels.problem import DrawnRows, LocalProblem
from vocabshard.kernels.sm90_inputs import ELEMENTS, addressable, for_tma, strides
from vocabshard.kernels.sm90_sampling import fits
from vocabshard.sampling import Step

DRAWN_ROWS = 64  # at most
RECORD_WORDS_DRAWN = 6
_AUTO: int = _C.SM90_PATHS["auto"]
_NO_FOLD = _C.FoldRows(0, 0, True, 0, 0, 0, 0, 0, 0)

Operands = tuple[Tensor, Tensor, Tensor | None, float | Tensor | None]  # hidden, weight, bias, inv_temperature


def _operands(x: Operands) -> tuple[_C.Sm90Forward, tuple[int, int, int, float], tuple[Tensor, ...]]:
    """The forward; bias, its type and the scales as kernels take them; and what has to live until they are launched."""
    hidden, weight, bias, scale = x
    row, column = strides(hidden)
    if hidden.dtype != torch.float32 and not addressable(hidden.data_ptr(), row, column):
        hidden = for_tma(hidden)
        row, column = hidden.stride()
    rows, depth = hidden.shape
    call = _C.Sm90Forward(
        hidden.device.index, ELEMENTS[hidden.dtype], rows, depth, weight.shape[0], hidden.data_ptr(), row, column,
        weight.data_ptr(), *strides(weight), False, _AUTO,
    )  # fmt: skip
    alive: tuple[Tensor, ...] = (hidden,)
    of_bias = element = 0
    if bias is not None:
        bias = bias if bias.stride(0) == 1 else bias.contiguous()
        of_bias, element, alive = bias.data_ptr(), ELEMENTS[bias.dtype], (hidden, bias)
    if isinstance(scale, Tensor):
        return call, (of_bias, element, scale.data_ptr(), 1.0), alive
    return call, (of_bias, element, 0, 1.0 if scale is None else scale), alive


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
    hidden, weight = x[0], x[1]
    device = hidden.device
    if hidden.shape[0] > DRAWN_ROWS or hidden.dtype == torch.float32 or problem.entropy:
        return False
    call, numbers, _alive = _operands(x)
    draw = _C.DrawRows(seed, 0 if row_keys is None else row_keys.data_ptr())
    if not call.draw(draw, problem.vocab_start, tokens, cut):
        return False
    workspace = torch.empty(call.plan()[1], dtype=torch.uint8, device=device)
    call.launch(
        torch._C._cuda_getCurrentRawStream(device.index),
        workspace.data_ptr(),
        0,
        problem.vocab_start,
        problem.valid,
        *numbers,
        problem.softcap or 0.0,
        0,
        weight.shape[0],
        records,
        fold,
    )
    return True


@functools.lru_cache(maxsize=256)
def _truncations(steps: tuple[Step, ...]) -> _C.SamplingSteps:
    return _C.SamplingSteps([tuple(step) for step in steps])


def sample_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    seed: int,
    row_keys: Tensor,
    steps: tuple[Step, ...],
    ignore_index: int,
    real_vocab_size: int,
    invalid: str,
    want_lse: bool = True,
) -> DrawnRows | None:
    """Of rows that are whole here, from their logits, in one call: what sm90.forward, sampling_rows and the fold do."""
    rows, device = hidden.shape[0], hidden.device
    if not (rows and weight.shape[0] and fits(problem)) or len(steps) > _C.SAMPLING_STEPS or problem.entropy:
        return None
    call, numbers, _alive = _operands((hidden, weight, bias, inv_temperature))
    truncations = _truncations(steps)
    drawn = torch.empty(3, rows, dtype=torch.int64, device=device)
    out = DrawnRows(drawn[1], *_new(rows, device, want_lse))
    workspace = torch.empty(call.sample_bytes(truncations), dtype=torch.uint8, device=device)
    call.sample(
        truncations, torch._C._cuda_getCurrentRawStream(device.index), workspace.data_ptr(), problem.vocab_start,
        problem.valid, *numbers, problem.softcap or 0.0, seed, row_keys.data_ptr(), drawn.data_ptr(),
        out.cut.data_ptr(), _fold(out, ignore_index, real_vocab_size, invalid),
    )  # fmt: skip
    return out


def _new(rows: int, device: torch.device, want_lse: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cut, logp, lse."""
    logp = torch.empty(rows, dtype=torch.float32, device=device)
    cut = torch.empty(rows, dtype=torch.int64, device=device)
    return cut, logp, torch.empty_like(logp) if want_lse else None


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
    rows, device = hidden.shape[0], hidden.device
    out = DrawnRows(torch.empty(rows, dtype=torch.int64, device=device), *_new(rows, device, want_lse))
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
    out = DrawnRows(torch.empty(rows, dtype=torch.int64, device=device), *_new(rows, device, want_lse))
    fold = _fold(out, ignore_index, real_vocab_size, invalid)
    _C.sm90_fold_drawn(
        device.index, gathered.data_ptr(), ranks, rows, fold, out.tokens.data_ptr(), out.cut.data_ptr(),
        torch._C._cuda_getCurrentRawStream(device.index),
    )  # fmt: skip
    return out
