"""The backward's matrix products in Triton: every element one ascending chain in an fp32 accumulator.

Programs walk output tiles, as many programs as the chip holds. Operands come through tensor maps, or through pointers
where the copy engine can't address them. Tile shapes and the order of tiles change no byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vocabshard.kernels.triton_linear import store_columns


@triton.jit
def chain_maps(a, b, m, n, K, acc, A_ROWS_ARE_K: tl.constexpr, B_ROWS_ARE_K: tl.constexpr, BK: tl.constexpr):
    """acc [BM, BN] + sum over k of a[m + i, k] * b[k, n + j], both through tensor maps; what is outside them is 0."""
    for k in tl.range(0, K, BK):
        if A_ROWS_ARE_K:
            x = a.load([k, m]).T
        else:
            x = a.load([m, k])
        if B_ROWS_ARE_K:
            y = b.load([k, n])
        else:
            y = b.load([n, k]).T
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def chain_strided(
    a, b, keep, rows, columns, M, N, K, am, ak, bk, bn, acc, KEEP: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """The same through pointers; with KEEP, a k whose keep[k] is 0 counts for nothing, whatever b holds there."""
    ks = tl.arange(0, BK)
    x_at = a + rows.to(tl.int64)[:, None] * am + ks.to(tl.int64)[None, :] * ak
    y_at = b + ks.to(tl.int64)[:, None] * bk + columns.to(tl.int64)[None, :] * bn
    x_row = (rows < M)[:, None]
    y_column = (columns < N)[None, :]
    for k in tl.range(0, K, BK):
        inside = ks < K - k
        x = tl.load(x_at, mask=x_row & inside[None, :], other=0.0)
        if KEEP:
            inside &= tl.load(keep + k + ks, mask=inside, other=0) != 0
        y = tl.load(y_at, mask=inside[:, None] & y_column, other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        x_at += BK * ak
        y_at += BK * bk
    return acc


@triton.jit
def load_columns(of, row, column, BM: tl.constexpr, BN: tl.constexpr):
    """The reverse of store_columns."""
    if BN == 64:
        return of.load([row, column])
    elif BN == 128:
        return side_by_side(of.load([row, column]), of.load([row, column + 64]), BM, 128)
    else:
        left = side_by_side(of.load([row, column]), of.load([row, column + 64]), BM, 128)
        right = side_by_side(of.load([row, column + 128]), of.load([row, column + 192]), BM, 128)
        return side_by_side(left, right, BM, 256)


@triton.jit
def side_by_side(left, right, BM: tl.constexpr, BN: tl.constexpr):
    """Two halves as [BM, BN]."""
    return tl.join(left, right).trans(0, 2, 1).reshape(BM, BN)


@triton.jit(do_not_specialize=["M", "N", "K", "flags"])
def product(
    a_map,
    b_map,
    out_map,
    a,
    b,
    out,
    keep,
    dirty,
    M,
    N,
    K,
    flags,
    am,
    ak,
    bk,
    bn,
    om,
    on,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    MAPS: tl.constexpr,
    A_ROWS_ARE_K: tl.constexpr,
    KEEP: tl.constexpr,
    WHEN: tl.constexpr,  # "always", or as the flags `dirty` say: "clean" if none is set, "dirty" if one is
    OUT_MAP: tl.constexpr,
    GO_ON: tl.constexpr,  # the chain starts from what `out` holds, not from 0
    ADD: tl.constexpr,  # the finished chain is added to `out`
):
    """out[m, n] = sum over k of a[m, k] * b[k, n]."""
    run = True
    if WHEN != "always":
        found = 0
        for first in range(0, flags, 1024):
            at = first + tl.arange(0, 1024)
            found = tl.maximum(found, tl.max(tl.load(dirty + at, mask=at < flags, other=0), 0))
        run = (found == 0) == (WHEN == "clean")
    column_blocks = tl.cdiv(N, BN)
    tiles = tl.where(run, tl.cdiv(M, BM) * column_blocks, 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        # rows fastest within a group of row blocks
        group = tile // (GROUP * column_blocks)
        group_rows = tl.minimum(tl.cdiv(M, BM) - group * GROUP, GROUP)
        in_group = tile - group * (GROUP * column_blocks)
        m = (group * GROUP + in_group % group_rows) * BM
        n = in_group // group_rows * BN
        rows = m + tl.arange(0, BM)
        columns = n + tl.arange(0, BN)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        at = out + m.to(tl.int64) * om + n.to(tl.int64) * on
        at += (tl.arange(0, BM) * om)[:, None] + (tl.arange(0, BN) * on)[None, :]
        if GO_ON and OUT_MAP:
            acc = load_columns(out_map, m, n, BM, BN)
        elif GO_ON:
            acc = tl.load(at, mask=inside, other=0.0)
        else:
            acc = tl.zeros([BM, BN], tl.float32)
        if MAPS:
            acc = chain_maps(a_map, b_map, m, n, K, acc, A_ROWS_ARE_K, True, BK)
        else:
            acc = chain_strided(a, b, keep, rows, columns, M, N, K, am, ak, bk, bn, acc, KEEP, BK)
        if ADD and OUT_MAP:
            acc += load_columns(out_map, m, n, BM, BN)
        elif ADD:
            acc += tl.load(at, mask=inside, other=0.0)
        if OUT_MAP and out.dtype.element_ty == tl.float32:
            store_columns(out_map, m, n, acc, BM, BN)
        elif OUT_MAP:
            out_map.store([m, n], acc.to(out.dtype.element_ty))
        else:
            tl.store(at, acc.to(out.dtype.element_ty), mask=inside)
