"""Partials in Triton: tiles into the counters of a lane, lanes into a record, records of runs into one.

A lane is whatever keeps a running maximum and counters of its own; arrays of them are [rows, lanes].
"""

from __future__ import annotations

import triton
import triton.language as tl

from vocabshard.triton_contract import (
    LIMIT,
    LN2_F32,
    LOG2E,
    MAGIC,
    NAN_BITS,
    SCALE,
    SPAN,
    constant,
    entropy_limbs_at,
    exp_k,
    exp_scaled,
    fma,
    halve_add,
    halve_max,
    k_of_max,
    limb_top,
    max_nan,
    pack_word0,
    poisons,
    raise_counters,
    tile_limbs,
    tile_limbs_at,
    tree16,
    unpack_max,
    unpack_target_bits,
)

# Rows of this many running maxima below it can hold a column that the clamp at -2^20 raises into the kept terms.
CLAMP_MATTERS = constant(-(2.0**20) + 256.0)


@triton.jit
def add_tiles(c, x, TILES: tl.constexpr):
    """c + the sum of x over its last dimension, TILES wide."""
    if TILES == 8:
        x = halve_add(x)
    if TILES >= 4:
        x = halve_add(x)
    if TILES >= 2:
        x = halve_add(x)
    return c + x.reshape(c.shape)


@triton.jit
def max_tiles(y, TILES: tl.constexpr):
    """Maximum of y [rows, lanes, TILES, 16] over what each lane holds, [rows, lanes]; a NaN stays."""
    x = halve_max(halve_max(halve_max(halve_max(y)))).reshape(y.shape[:3])
    if TILES == 8:
        x = halve_max(x)
    if TILES >= 4:
        x = halve_max(x)
    if TILES >= 2:
        x = halve_max(x)
    return x.reshape(y.shape[:2])


@triton.jit
def add_block(y, K, c0, c1, c2, TILES: tl.constexpr):
    """Adds the tiles of y [rows, lanes, TILES, 16] to each lane's counters [rows, lanes]; K its running maximum's k."""
    magic = (SCALE - K).to(tl.float32) + MAGIC
    # what is dropped anyway, -inf too, becomes a term of 2^(K - SPAN - 1): no selection, and nothing subnormal
    floor = (K - (SPAN + 1)).to(tl.float32) * LN2_F32
    s = tree16(exp_scaled(tl.maximum(y, floor[:, :, None, None]), magic[:, :, None, None]))
    l0, l1, l2 = tile_limbs(s, K[:, :, None])
    return add_tiles(c0, l0, TILES), add_tiles(c1, l1, TILES), add_tiles(c2, l2, TILES)


@triton.jit
def add_block_entropy(y, K, c0, c1, c2, u0, u1, u2, TILES: tl.constexpr):
    """The same with the entropy's counters: every tile is centred on its own K."""
    y_max = halve_max(halve_max(halve_max(halve_max(y)))).reshape(y.shape[:3])
    Kt = exp_k(tl.maximum(y_max, -LIMIT))
    magic = (SCALE - Kt).to(tl.float32) + MAGIC
    floor = (Kt - (SPAN + 1)).to(tl.float32) * LN2_F32
    v = tl.maximum(y, floor[:, :, :, None])
    e = exp_scaled(v, magic[:, :, :, None])
    s = tree16(e)
    w = tree16(e * fma(v, LOG2E, tl.broadcast_to((-Kt).to(tl.float32)[:, :, :, None], v.shape)))
    s = tl.where(y_max == float("-inf"), 0.0, s)  # a tile of -inf is no tile
    w = tl.where(y_max == float("-inf"), 0.0, w)
    l0, l1, l2 = tile_limbs_at(s, Kt, limb_top(K, False)[:, :, None])
    value = Kt.to(tl.float64) * s.to(tl.float64) + w.to(tl.float64)  # the product is exact
    e0, e1, e2 = entropy_limbs_at(value, Kt, limb_top(K, True)[:, :, None])
    return (
        add_tiles(c0, l0, TILES),
        add_tiles(c1, l1, TILES),
        add_tiles(c2, l2, TILES),
        add_tiles(u0, e0, TILES),
        add_tiles(u1, e1, TILES),
        add_tiles(u2, e2, TILES),
    )


@triton.jit
def add_to_partials(tiles, y_max, clamp_matters, c0, c1, c2, u0, u1, u2, TILES: tl.constexpr, ENTROPY: tl.constexpr):
    """Adds tiles [rows, lanes, TILES, 16] to every lane's partial (y_max and counters, [rows, lanes]).

    clamp_matters, a scalar, starts as 1 and says whether columns below -2^20 may still reach kept terms.
    """
    raised = max_nan(y_max, max_tiles(tiles, TILES))
    K_before = exp_k(tl.maximum(y_max, -LIMIT))
    K = exp_k(tl.maximum(raised, -LIMIT))
    if clamp_matters != 0:
        tiles = tl.where(tiles == float("-inf"), tiles, max_nan(tiles, -LIMIT + tl.zeros_like(tiles)))
        clamp_matters = tl.max(tl.max((raised < CLAMP_MATTERS).to(tl.int32), 1), 0)
    c0, c1, c2 = raise_counters(c0, c1, c2, limb_top(K, False) - limb_top(K_before, False))
    if ENTROPY:
        u0, u1, u2 = raise_counters(u0, u1, u2, limb_top(K, True) - limb_top(K_before, True))
        c0, c1, c2, u0, u1, u2 = add_block_entropy(tiles, K, c0, c1, c2, u0, u1, u2, TILES)
    else:
        c0, c1, c2 = add_block(tiles, K, c0, c1, c2, TILES)
    return raised, clamp_matters, c0, c1, c2, u0, u1, u2


@triton.jit
def store_counters(to, N, inside, merged, y_max, c0, c1, c2, ENTROPY: tl.constexpr):
    """Adds up the counters of the lanes of each row and stores the three."""
    rise = limb_top(k_of_max(merged), ENTROPY)[:, None] - limb_top(k_of_max(y_max), ENTROPY)
    c0, c1, c2 = raise_counters(c0, c1, c2, rise)
    void = poisons(merged)
    tl.store(to, tl.where(void, 0, tl.sum(c0, 1)), mask=inside)
    tl.store(to + N, tl.where(void, 0, tl.sum(c1, 1)), mask=inside)
    tl.store(to + 2 * N.to(tl.int64), tl.where(void, 0, tl.sum(c2, 1)), mask=inside)


@triton.jit(do_not_specialize=["N", "runs"])
def merge_runs(parts, records, N, runs, BR: tl.constexpr, BS: tl.constexpr, ENTROPY: tl.constexpr):
    """parts [runs, R, N] -> records [R, N]."""
    WORDS: tl.constexpr = 7 if ENTROPY else 4
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    of = tl.arange(0, BS)
    stride = N.to(tl.int64)
    y_max = tl.full([BR], float("-inf"), tl.float32)
    target_bits = tl.full([BR], NAN_BITS, tl.int32)
    for s in range(0, runs, BS):
        inside = (s + of < runs)[:, None] & (rows < N)[None, :]
        at = parts + (s + of).to(tl.int64)[:, None] * (WORDS * stride) + rows[None, :]
        word = tl.load(at, mask=inside, other=0)
        y_max = max_nan(y_max, tl.reduce(tl.where(inside, unpack_max(word), float("-inf")), 0, max_nan))
        # at most one run holds the target; NAN_BITS ^ x is 0 in the others
        found = tl.sum(tl.where(inside, unpack_target_bits(word) ^ NAN_BITS, 0), 0)
        target_bits = target_bits ^ found
    c0 = tl.zeros([BR], tl.int64)
    c1, c2, u0, u1, u2 = c0, c0, c0, c0, c0
    k = k_of_max(y_max)[None, :]
    for s in range(0, runs, BS):
        inside = (s + of < runs)[:, None] & (rows < N)[None, :]
        at = parts + (s + of).to(tl.int64)[:, None] * (WORDS * stride) + rows[None, :]
        word = tl.load(at, mask=inside, other=0)
        k_run = k_of_max(tl.where(inside, unpack_max(word), float("-inf")))
        d0, d1, d2 = load_raised(at + stride, stride, inside, k, k_run, False)
        c0, c1, c2 = c0 + d0, c1 + d1, c2 + d2
        if ENTROPY:
            d0, d1, d2 = load_raised(at + 4 * stride, stride, inside, k, k_run, True)
            u0, u1, u2 = u0 + d0, u1 + d1, u2 + d2
    void = poisons(y_max)
    to = records + rows
    inside = rows < N
    tl.store(to, pack_word0(y_max, target_bits), mask=inside)
    tl.store(to + stride, tl.where(void, 0, c0), mask=inside)
    tl.store(to + 2 * stride, tl.where(void, 0, c1), mask=inside)
    tl.store(to + 3 * stride, tl.where(void, 0, c2), mask=inside)
    if ENTROPY:
        tl.store(to + 4 * stride, tl.where(void, 0, u0), mask=inside)
        tl.store(to + 5 * stride, tl.where(void, 0, u1), mask=inside)
        tl.store(to + 6 * stride, tl.where(void, 0, u2), mask=inside)


@triton.jit
def load_raised(at, stride, inside, k, k_run, ENTROPY: tl.constexpr):
    """Sums over the first dimension of counters that were raised to k."""
    c0 = tl.load(at, mask=inside, other=0)
    c1 = tl.load(at + stride, mask=inside, other=0)
    c2 = tl.load(at + 2 * stride, mask=inside, other=0)
    c0, c1, c2 = raise_counters(c0, c1, c2, limb_top(k, ENTROPY) - limb_top(k_run, ENTROPY))
    return tl.sum(c0, 0), tl.sum(c1, 0), tl.sum(c2, 0)
