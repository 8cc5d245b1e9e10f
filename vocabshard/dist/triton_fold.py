"""The fold in Triton: gathered records [W, R, N] -> results of each row, ranks in ascending order."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocabshard.contract import RECORD_WORDS
from vocabshard.partials import FoldedRows
from vocabshard.triton_contract import (
    INV_LOG2E,
    LIMIT,
    LN2,
    LOG2E,
    NAN_BITS,
    canonical_bits,
    counters_value,
    exp_k,
    exp_poly,
    exponent_f64,
    fma,
    from_bits,
    k_of_max,
    limb_top,
    log2_split,
    mantissa_f64,
    max_nan,
    poisons,
    raise_counters,
    unpack_max,
    unpack_target_bits,
)

BLOCK = 128


@triton.jit
def load_merged(records, rows, inside, k_max, W, stride, words, FIRST: tl.constexpr, ENTROPY: tl.constexpr):
    """The counters of words FIRST ... FIRST + 2, all ranks raised to k_max and added in ascending order."""
    c0 = tl.zeros(k_max.shape, tl.int64)
    c1, c2 = c0, c0
    for w in range(W):
        at = records + w * (words * stride) + rows
        k = k_of_max(unpack_max(tl.load(at, mask=inside, other=0)))
        at += FIRST * stride
        d0 = tl.load(at, mask=inside, other=0)
        d1 = tl.load(at + stride, mask=inside, other=0)
        d2 = tl.load(at + 2 * stride, mask=inside, other=0)
        d0, d1, d2 = raise_counters(d0, d1, d2, limb_top(k_max, ENTROPY) - limb_top(k, ENTROPY))
        c0, c1, c2 = c0 + d0, c1 + d1, c2 + d2
    return c0, c1, c2


@triton.jit(do_not_specialize=["N", "W", "ignore_index", "real_vocab_size"])
def fold_rows(
    records,
    target_ids,
    logp,
    lse,
    entropy,
    lse2_int,
    lse2_frac,
    maximum,
    N,
    W,
    ignore_index,
    real_vocab_size,
    INVALID_NAN: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
):
    words: tl.constexpr = 7 if ENTROPY else 4
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    stride = N.to(tl.int64)

    y_max = tl.full([ROWS], float("-inf"), tl.float32)
    target_bits = tl.full([ROWS], NAN_BITS, tl.int32)
    for w in range(W):
        word = tl.load(records + w * (words * stride) + rows, mask=inside, other=0)
        y_max = max_nan(y_max, unpack_max(word))
        found = from_bits(target_bits)
        target_bits = tl.where(found == found, target_bits, unpack_target_bits(word))
    y_target = from_bits(target_bits)
    k_max = k_of_max(y_max)
    c0, c1, c2 = load_merged(records, rows, inside, k_max, W, stride, words, 1, False)

    empty = y_max == float("-inf")
    poisoned = poisons(y_max) | ((y_max <= -LIMIT) & (empty == 0))
    usable = (empty | poisoned) == 0
    nan = from_bits(tl.full([ROWS], NAN_BITS, tl.int32))

    J = limb_top(k_max, False)
    total = tl.where(usable, counters_value(c0, c1, c2), 1.0)
    a, l2 = log2_split(total)
    whole = a + 32 * (J - 1)
    lse2 = whole.to(tl.float64) + l2

    # m / p_t, not log2 m - log2 p_t: the target's own rounding cancels
    near_target = (y_target >= -LIMIT) & (y_target <= LIMIT)
    safe = tl.where(near_target, y_target, 0.0)
    k_t = exp_k(safe)
    p_t = exp_poly(fma(safe, LOG2E, -(k_t.to(tl.float32))))
    ratio_a, ratio_l = log2_split(mantissa_f64(total) / p_t.to(tl.float64))
    near = ((exponent_f64(total) + 32 * (J - 1) - k_t + ratio_a).to(tl.float64) + ratio_l) * LN2
    far = (y_target.to(tl.float64) * LOG2E - lse2) * LN2
    x = tl.where(near_target, -near, far)
    scored = tl.where(x < 0.0, x.to(tl.float32), 0.0)
    scored = tl.where(y_target == y_target, scored, nan)
    scored = tl.where(y_target == float("-inf"), float("-inf"), scored)
    scored = tl.where(poisoned, nan, tl.where(empty, float("-inf"), scored))

    target = tl.load(target_ids + rows, mask=inside, other=0)
    valid = (target >= 0) & (target < real_vocab_size)
    if INVALID_NAN:
        scored = tl.where(valid, scored, nan)
    else:
        scored = tl.where(valid, scored, 0.0)
    tl.store(logp + rows, tl.where(target == ignore_index, 0.0, scored), mask=inside)

    of_sum = tl.where(empty, float("-inf"), (lse2 * INV_LOG2E).to(tl.float32))
    tl.store(lse + rows, tl.where(poisoned, nan, of_sum), mask=inside)
    tl.store(lse2_int + rows, tl.where(usable, whole, 0), mask=inside)
    tl.store(lse2_frac + rows, tl.where(poisoned, nan, tl.where(empty, 0.0, l2.to(tl.float32))), mask=inside)
    tl.store(maximum + rows, from_bits(canonical_bits(y_max)), mask=inside)

    if ENTROPY:
        u0, u1, u2 = load_merged(records, rows, inside, k_max, W, stride, words, 4, True)
        scale = tl.where(limb_top(k_max, True) == J, 1.0, 4294967296.0).to(tl.float64)
        mean = counters_value(u0, u1, u2) / total * scale
        h = (lse2 - mean) * LN2
        of_row = tl.where(h > 0.0, h.to(tl.float32), 0.0)
        tl.store(entropy + rows, tl.where(poisoned, nan, tl.where(empty, 0.0, of_row)), mask=inside)


def fold(gathered: Tensor, target_ids: Tensor, ignore_index: int, real_vocab_size: int, invalid: str) -> FoldedRows:
    """gathered int64 [W, R, N], target_ids int64 [N] of global ids -> FoldedRows, [N] each; on the current stream."""
    gathered, target_ids = gathered.contiguous(), target_ids.contiguous()
    W, words, N = gathered.shape
    entropy = words > RECORD_WORDS

    def new(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(N, dtype=dtype, device=gathered.device)

    out = FoldedRows(new(), new(), new() if entropy else None, new(torch.int32), new(), new())
    if N == 0:
        return out
    on_device = torch.cuda.device(gathered.device) if gathered.device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        fold_rows[(triton.cdiv(N, BLOCK),)](
            gathered,
            target_ids,
            out.logp,
            out.lse,
            out.entropy,
            out.lse2_int,
            out.lse2_frac,
            out.maximum,
            N,
            W,
            ignore_index,
            real_vocab_size,
            INVALID_NAN=invalid == "nan",
            ENTROPY=entropy,
            ROWS=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
