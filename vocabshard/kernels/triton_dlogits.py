"""dL/dz of a block of columns in Triton: logits made again by the forward's chain, gradients formed in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from vocabshard.kernels.triton_linear import chain_fma, chain_pointers
from vocabshard.kernels.triton_products import chain_maps
from vocabshard.triton_contract import E1, E2, E3, E4, E5, E6, LN2_F32, LOG2E, fma, softcap_pinned


@triton.jit
def log2_p(y, whole, rest):
    """log2 of the probability of y, where lse * log2(e) = whole + rest.

    The integer is taken away inside the FMA, so that no digit is lost a long way from 0.
    """
    return fma(y, LOG2E, tl.broadcast_to(-whole, y.shape)) - rest


@triton.jit
def from_log2(x, of_softmax, of_log, ENTROPY: tl.constexpr):
    """p * (of_softmax - of_log * x), x = log2 p."""
    p = tl.exp2(x)
    if ENTROPY:
        inner = fma(tl.broadcast_to(-of_log, x.shape), x, tl.broadcast_to(of_softmax, x.shape))
        return tl.where(p == 0.0, 0.0, p * inner)  # x may be -inf
    else:
        return p * of_softmax


@triton.jit
def pick(x, column):
    """x [rows, columns] at `column` [rows], 0 where it is none of them."""
    return tl.sum(tl.where(column[:, None] == tl.arange(0, x.shape[1])[None, :], x, 0.0), 1)  # one x and zeros


@triton.jit
def exp2_minus_one(x):
    """2^x - 1 for x <= 0, with the digits that 2^x has lost where it is near 1."""
    q = fma(x, E6, E5)
    q = fma(q, x, E4)
    q = fma(q, x, E3)
    q = fma(q, x, E2)
    q = fma(q, x, E1)
    return tl.where(tl.abs(x) <= 0.5, q * x, tl.exp2(x) - 1.0)


@triton.jit(do_not_specialize=["N", "width"])
def dlogits_block(
    hidden_map,
    weight_map,
    out_map,
    hidden,
    weight,
    bias,
    kept,
    target_ids,
    inv_temperature,
    cut_logit,
    cut_tie,
    lse2_int,
    lse2_frac,
    entropy,
    grad_target,
    grad_softmax,
    grad_entropy,
    out,
    sums,
    N,
    width,  # columns of the block, which `weight` and `bias` start with
    D,
    first_id,  # global id of its first column
    hn,
    hd,
    wv,
    wd,
    bv,
    kn,
    on,
    sn,
    scale,
    cap,
    cap_reciprocal,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    CHAIN: tl.constexpr,  # "descriptors", "pointers", "fma", or "kept": the logits are there
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,  # as in linear_partials
    TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    STORE: tl.constexpr,
    CUT: tl.constexpr,  # columns that a truncation leaves out count as -inf
    SUMS: tl.constexpr,  # sums over the rows of each row block go to `sums`, fp32 [row blocks, width]
):
    """dlogits [N, width] in the operands' dtype, exactly 0 in masked columns and in rows without a gradient.

    The logits are made by the forward's chain, or read from `kept`: bias and soft-cap are then in them.
    """
    row_blocks = tl.cdiv(N, BM)
    blocks = tl.cdiv(width, BN)
    for tile in tl.range(tl.program_id(0), row_blocks * blocks, tl.num_programs(0), flatten=FLATTEN):
        # rows fastest within a group of row blocks, as in the forward
        group = tile // (GROUP * blocks)
        group_rows = tl.minimum(row_blocks - group * GROUP, GROUP)
        in_group = tile - group * (GROUP * blocks)
        m = (group * GROUP + in_group % group_rows) * BM
        n = in_group // group_rows * BN
        rows = m + tl.arange(0, BM)
        columns = n + tl.arange(0, BN)
        # rows of `kept` and `out` are whole multiples of 16 elements: what is beyond `width` is never read again
        stored = (rows < N)[:, None] & (columns < tl.cdiv(width, 16) * 16)[None, :]
        if CHAIN == "kept":
            z = tl.load(kept + rows.to(tl.int64)[:, None] * kn + columns[None, :], mask=stored, other=0.0)
        elif CHAIN == "fma":
            z = chain_fma(hidden, weight, rows, columns, N, width, D, hn, hd, wv, wd, BM, BN)
        elif CHAIN == "pointers":
            z = chain_pointers(hidden, weight, rows, columns, N, width, D, hn, hd, wv, wd, BM, BN, BK)
        else:
            z = chain_maps(hidden_map, weight_map, m, n, D, tl.zeros([BM, BN], tl.float32), False, False, BK)

        # rows beyond N have coefficients of 0
        here = rows < N
        whole = tl.load(lse2_int + rows, mask=here, other=0).to(tl.float32)
        rest = tl.load(lse2_frac + rows, mask=here, other=0.0)
        of_target = tl.load(grad_target + rows, mask=here, other=0.0)
        of_softmax = tl.load(grad_softmax + rows, mask=here, other=0.0)
        active = (of_target != 0.0) | (of_softmax != 0.0)
        of_both = of_target + of_softmax
        e = of_target
        if ENTROPY:
            e = tl.load(grad_entropy + rows, mask=here, other=0.0)
            active |= e != 0.0
            centre = e * tl.load(entropy + rows, mask=here, other=0.0)
            of_softmax -= centre
            of_both -= centre
            e *= LN2_F32
        local = tl.load(target_ids + rows, mask=here, other=-1) - (first_id + n)
        local = tl.where((local >= 0) & (local < BN) & here, local, -1).to(tl.int32)

        if BIAS and CHAIN != "kept":
            b = tl.load(bias + columns.to(tl.int64) * bv, mask=columns < width, other=0.0).to(tl.float32)
            z += b[None, :]
        y = z
        if SOFTCAP != "none":
            if CHAIN != "kept":
                y = softcap_pinned(z, cap, cap_reciprocal, SOFTCAP == "quick")
            tanh = y * cap_reciprocal
            slope = tl.where(tl.abs(y) < float("inf"), 1.0 - tanh * tanh, 0.0)  # 0 for infinities, which pass
        if CUT:  # a NaN stays
            limit = tl.load(cut_logit + rows, mask=here, other=float("-inf"))
            last = tl.load(cut_tie + rows, mask=here, other=0) - first_id
            last = tl.minimum(tl.maximum(last, -1), 2147483647).to(tl.int32)  # a column of this block
            beyond = (y == limit[:, None]) & (columns[None, :] > last[:, None])
            y = tl.where((y < limit[:, None]) | beyond, float("-inf"), y)
        if TEMPERATURE == "scalar":
            y *= scale
            row_scale = tl.full([BM], scale, tl.float32)
        if TEMPERATURE == "rows":
            row_scale = tl.load(inv_temperature + rows, mask=here, other=1.0)
            y *= row_scale[:, None]
        if TEMPERATURE != "none":
            of_softmax *= row_scale
            of_both *= row_scale
            if ENTROPY:
                e *= row_scale
        x = log2_p(y, whole[:, None], rest[:, None])
        hits = tl.max(local, 0) >= 0
        at_target = tl.zeros([BM], tl.float32)
        if SOFTCAP != "none":
            # two long steps of an element in a row: a condition between them would keep both of a whole block
            at_target = pick(x, local)
            slope_at_target = pick(slope, local)
        elif hits:
            at_target = pick(x, local)
        dz = from_log2(x, of_softmax[:, None], e[:, None], ENTROPY)
        if SOFTCAP != "none":
            dz *= slope
        if hits:
            # target + p * inner = (target + inner) + (p - 1) * inner: near-certain targets keep their digits
            inner, both = of_softmax, of_both
            if ENTROPY:
                inner = fma(-e, at_target, inner)
                both = fma(-e, at_target, both)
            of_hit = tl.where(at_target == float("-inf"), 0.0, both + exp2_minus_one(at_target) * inner)
            if SOFTCAP != "none":
                of_hit *= slope_at_target
            dz = tl.where(local[:, None] == tl.arange(0, BN)[None, :], of_hit[:, None], dz)
        dz = tl.where(active[:, None], dz, 0.0)
        if SUMS:
            at = sums + (m // BM).to(tl.int64) * sn + columns
            tl.store(at, tl.sum(dz, 0), mask=columns < width)
        if STORE:
            value = dz.to(out.dtype.element_ty)
            if CHAIN == "descriptors":
                # half a tile at a time: more of the shared memory is the pipeline's
                left, right = tl.split(value.reshape(BM, 2, BN // 2).trans(0, 2, 1))
                out_map.store([m, n], left)
                out_map.store([m, n + BN // 2], right)
            else:
                at = out + rows.to(tl.int64)[:, None] * on + columns[None, :]
                tl.store(at, value, mask=stored)


@triton.jit(do_not_specialize=["parts", "width"])
def add_parts(sums, total, parts, width, sn, BLOCK: tl.constexpr, GO_ON: tl.constexpr):
    """total [width] (+)= sum over parts of sums [parts, width], in ascending order."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    acc = tl.zeros([BLOCK], tl.float32)
    if GO_ON:
        acc = tl.load(total + columns, mask=inside, other=0.0)
    at = sums + columns
    for _ in range(parts):
        acc += tl.load(at, mask=inside, other=0.0)
        at += sn
    tl.store(total + columns, acc, mask=inside)


@triton.jit(do_not_specialize=["N", "D"])
def inspect_rows(
    hidden, grad_target, grad_softmax, grad_entropy, keep, dirty, N, D, hn, hd, ENTROPY: tl.constexpr,
    ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """keep int8 [N]: rows with any upstream gradient; dirty int32 [row blocks]: 1 where another row is not finite."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < N
    active = tl.load(grad_target + rows, mask=here, other=1.0) != 0.0
    active |= tl.load(grad_softmax + rows, mask=here, other=1.0) != 0.0
    if ENTROPY:
        active |= tl.load(grad_entropy + rows, mask=here, other=1.0) != 0.0
    tl.store(keep + rows, active.to(tl.int8), mask=here)
    found = tl.zeros([ROWS], tl.int32)
    idle = here & (active == 0)
    if tl.max(idle.to(tl.int32), 0) > 0:
        for d in range(0, D, BK):
            at = d + tl.arange(0, BK)
            h = tl.load(
                hidden + rows.to(tl.int64)[:, None] * hn + at.to(tl.int64)[None, :] * hd,
                mask=idle[:, None] & (at < D)[None, :],
                other=0.0,
            ).to(tl.float32)
            found = tl.maximum(found, tl.max((tl.abs(h) < float("inf")).to(tl.int32) ^ 1, 1))
    tl.store(dirty + tl.program_id(0), tl.max(found, 0))
