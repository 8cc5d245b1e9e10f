"""hidden [N, D] x weight [V_local, D] -> records, in Triton: the logits stay in registers.

A program walks a run of vocabulary blocks for one block of rows. Each lane of the matrix unit's accumulator owns whole
16-column tiles (the rows of `weight` are read in an order that makes it so), keeps a partial of its own and needs no
other lane until the run is over. Partials of runs are then merged by a second kernel; both merges are integer sums, so
block shapes, runs and order change no byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vocabshard.contract import FMA_CHAIN, HOPPER_K16
from vocabshard.kernels.problem import KeptLogits, LocalProblem
from vocabshard.kernels.triton_config import LaunchConfig, launch_config, merge_block
from vocabshard.kernels.triton_launch import chain_of, epilogue_of, launching_on, sm_count_of
from vocabshard.kernels.triton_partials import add_to_partials, merge_runs, store_counters
from vocabshard.partials import identity_records, new_records
from vocabshard.sampling import cut_parts
from vocabshard.triton_contract import (
    INTERPRETED,
    NAN_BITS,
    bits,
    canonical_bits,
    fma,
    from_bits,
    halve_max,
    pack_word0,
    softcap_pinned,
)


@triton.jit
def quad_order(n):
    """Column, within a block, whose weights stand at position n: position 64a + 8i + 2q + e holds 64a + 16q + 2i + e.

    In the accumulator lane q of a quad holds positions 8i + 2q + e, so it owns columns 16q ... 16q + 15.
    """
    return (n & ~63) | (((n >> 1) & 3) << 4) | (((n >> 3) & 7) << 1) | (n & 1)


@triton.jit
def to_columns(acc, BM: tl.constexpr, BN: tl.constexpr):
    """An accumulator in quad order as [BM, BN] in column order; moves nothing between lanes."""
    return acc.reshape(BM, BN // 64, 8, 4, 2).trans(0, 1, 3, 2, 4).reshape(BM, BN)


@triton.jit
def chain_descriptors(hidden, weight, row, block, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The tensor core's chain for a [BM, BN] block of logits, both operands by TMA."""
    acc = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, D, BK):
        h = hidden.load([row, k])
        w = weight.load([block * (BN // 64), 0, 0, 0, k]).reshape(BN, BK)
        acc = tl.dot(h, w.T, acc)
    return acc


@triton.jit
def chain_pointers(
    hidden, weight, rows, columns, N, V, D, hn, hd, wv, wd, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """The same chain by pointers, for operands that TMA cannot address."""
    acc = tl.zeros([BM, BN], tl.float32)
    ks = tl.arange(0, BK)
    h_at = hidden + rows.to(tl.int64)[:, None] * hn + ks.to(tl.int64)[None, :] * hd
    w_at = weight + columns.to(tl.int64)[:, None] * wv + ks.to(tl.int64)[None, :] * wd
    h_row = (rows < N)[:, None]
    w_row = (columns < V)[:, None]
    for k in tl.range(0, D, BK):
        inside = (ks < D - k)[None, :]
        h = tl.load(h_at, mask=h_row & inside, other=0.0)
        w = tl.load(w_at, mask=w_row & inside, other=0.0)
        acc = tl.dot(h, w.T, acc)
        h_at += BK * hd
        w_at += BK * wd
    return acc


@triton.jit
def chain_fma(hidden, weight, rows, columns, N, V, D, hn, hd, wv, wd, BM: tl.constexpr, BN: tl.constexpr):
    """A chain of fp32 FMAs, one k at a time."""
    acc = tl.zeros([BM, BN], tl.float32)
    h_at = hidden + rows.to(tl.int64) * hn
    w_at = weight + columns.to(tl.int64) * wv
    for _ in tl.range(0, D, 1):
        h = tl.load(h_at, mask=rows < N, other=0.0).to(tl.float32)
        w = tl.load(w_at, mask=columns < V, other=0.0).to(tl.float32)
        acc = fma(tl.broadcast_to(h[:, None], [BM, BN]), tl.broadcast_to(w[None, :], [BM, BN]), acc)
        h_at += hd
        w_at += wd
    return acc


@triton.jit
def pick(y, column, found, BM: tl.constexpr, TILES: tl.constexpr):
    """Bits of y [BM, 4, TILES, 16] at `column` [BM] of the block, `found` where there is no such column."""
    first = 16 * tl.arange(0, 4)[None, :, None] + 64 * tl.arange(0, TILES)[None, None, :]
    at = column[:, None, None] - first
    hit = at[:, :, :, None] == tl.arange(0, 16)[None, None, None, :]
    # an integer sum of one pattern and zeros
    picked = tl.sum(tl.sum(tl.sum(tl.where(hit, bits(y), 0), 3), 2), 1)
    return tl.where((column >= 0) & (column < 64 * TILES), canonical_bits(from_bits(picked)), found)


@triton.jit
def store_columns(to, row, column, y, BM: tl.constexpr, BN: tl.constexpr):
    """Stores y [BM, BN], 64 columns at a time: what the copy engine takes from shared memory stays small."""
    if BN == 64:
        to.store([row, column], y)
    else:
        a, b = tl.split(y.reshape(BM, 2, BN // 2).trans(0, 2, 1))
        if BN == 128:
            to.store([row, column], a)
            to.store([row, column + 64], b)
        else:
            c, d = tl.split(a.reshape(BM, 2, 64).trans(0, 2, 1))
            e, f = tl.split(b.reshape(BM, 2, 64).trans(0, 2, 1))
            to.store([row, column], c)
            to.store([row, column + 64], d)
            to.store([row, column + 128], e)
            to.store([row, column + 192], f)


@triton.jit
def run_start(run, runs, short_runs, blocks, short_blocks):
    """First block of a run. The last `short_runs` share the last `short_blocks`, the others what is before them."""
    long_runs = runs - short_runs
    long_blocks = blocks - short_blocks
    of_long = run.to(tl.int64) * long_blocks // long_runs
    of_short = long_blocks + (run - long_runs).to(tl.int64) * short_blocks // tl.maximum(short_runs, 1)
    return tl.where(run <= long_runs, of_long, of_short).to(tl.int32)


@triton.jit(
    do_not_specialize=["N", "V", "V_local", "mapped", "vocab_start", "runs", "short_runs", "short_blocks"],
)
def linear_partials(
    hidden_map,
    weight_map,
    logits_map,
    tail_map,  # the columns beyond `mapped`, as one block
    hidden,
    weight,
    bias,
    target_ids,
    inv_temperature,
    cut_logit,
    cut_column,
    records,
    logits,
    N,
    V,
    V_local,
    mapped,  # leading columns that weight_map covers, whole blocks
    D,
    vocab_start,
    runs,
    short_runs,
    short_blocks,
    hn,
    hd,
    wv,
    wd,
    bv,
    ln,
    scale,
    cap,
    cap_reciprocal,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    CHAIN: tl.constexpr,  # "descriptors", "pointers" or "fma"
    TAIL: tl.constexpr,  # some columns are beyond `mapped`
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,  # "none", "quick" for caps that divide_by takes, "any"
    TEMPERATURE: tl.constexpr,  # "none", "scalar" or "rows"
    LOGITS: tl.constexpr,  # "none", or stored through "descriptors" or "pointers"
    ENTROPY: tl.constexpr,
    CUT: tl.constexpr,  # columns that a truncation leaves out count as -inf
):
    """Records of a block of rows over a run of column blocks, and their logits where asked for."""
    TILES: tl.constexpr = BN // 64
    row_blocks = tl.cdiv(N, BM)
    # rows fastest within a group of row blocks: the programs of the moment share few strips of weight and of hidden
    program = tl.program_id(0)
    group = program // (GROUP * runs)
    group_rows = tl.minimum(row_blocks - group * GROUP, GROUP)
    inside = program - group * (GROUP * runs)
    row_block = group * GROUP + inside % group_rows
    run = inside // group_rows
    blocks = tl.cdiv(V if LOGITS == "none" else V_local, BN)
    first = run_start(run, runs, short_runs, blocks, short_blocks)
    last = run_start(run + 1, runs, short_runs, blocks, short_blocks)

    rows = row_block * BM + tl.arange(0, BM)
    target = tl.load(target_ids + rows, mask=rows < N, other=-1) - vocab_start
    target = tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)
    target_bits = tl.full([BM], NAN_BITS, tl.int32)
    NEVER: tl.constexpr = 2147483647
    next_target = tl.min(tl.where(target >= first * BN, target // BN, NEVER), 0)
    if TEMPERATURE == "rows":
        row_scale = tl.load(inv_temperature + rows, mask=rows < N, other=1.0)
    if CUT:
        limit = tl.load(cut_logit + rows, mask=rows < N, other=float("-inf"))
        last_equal = tl.load(cut_column + rows, mask=rows < N, other=0)

    y_max = tl.full([BM, 4], float("-inf"), tl.float32)
    c0 = tl.zeros([BM, 4], tl.int64)
    c1, c2, u0, u1, u2 = c0, c0, c0, c0, c0
    clamp_matters = 1

    for block in tl.range(first, last, flatten=FLATTEN):
        columns = block * BN + tl.arange(0, BN)
        if CHAIN == "fma":
            y = chain_fma(hidden, weight, rows, columns, N, V_local, D, hn, hd, wv, wd, BM, BN)
        else:
            if CHAIN == "pointers":
                order = block * BN + quad_order(tl.arange(0, BN))
                y = chain_pointers(hidden, weight, rows, order, N, V_local, D, hn, hd, wv, wd, BM, BN, BK)
            else:
                of_block, at = weight_map, block
                if TAIL and block * BN >= mapped:
                    of_block, at = tail_map, 0
                y = chain_descriptors(hidden_map, of_block, row_block * BM, at, D, BM, BN, BK)
            y = to_columns(y, BM, BN)
        if BIAS:
            b = tl.load(bias + columns.to(tl.int64) * bv, mask=columns < V_local, other=0.0).to(tl.float32)
            y += b[None, :]
        if SOFTCAP != "none":
            y = softcap_pinned(y, cap, cap_reciprocal, SOFTCAP == "quick")
        if LOGITS != "none":
            if block * BN + BN > V:
                y = tl.where(columns[None, :] < V, y, float("-inf"))
            if LOGITS == "descriptors":
                store_columns(logits_map, row_block * BM, block * BN, y, BM, BN)
            else:
                corner = logits + (row_block * BM).to(tl.int64) * ln + block * BN
                at = (tl.arange(0, BM) * ln)[:, None] + tl.arange(0, BN)[None, :]
                tl.store(corner + at, y, mask=(rows < N)[:, None] & (columns < V_local)[None, :])
        if CUT:  # a NaN stays
            beyond = (y == limit[:, None]) & (columns[None, :] > last_equal[:, None])
            y = tl.where((y < limit[:, None]) | beyond, float("-inf"), y)
        if TEMPERATURE == "scalar":
            y *= scale
        if TEMPERATURE == "rows":
            y *= row_scale[:, None]
        if block * BN + BN > V:
            y = tl.where(columns[None, :] < V, y, float("-inf"))
        tiles = y.reshape(BM, TILES, 4, 16).trans(0, 2, 1, 3)
        if block == next_target:
            target_bits = pick(tiles, target - block * BN, target_bits, BM, TILES)
            next_target = tl.min(tl.where(target >= block * BN + BN, target // BN, NEVER), 0)
        y_max, clamp_matters, c0, c1, c2, u0, u1, u2 = add_to_partials(
            tiles, y_max, clamp_matters, c0, c1, c2, u0, u1, u2, TILES, ENTROPY
        )

    # the four lanes of a row, then its record
    merged = halve_max(halve_max(y_max)).reshape(BM)
    to = records + run.to(tl.int64) * ((7 if ENTROPY else 4) * N.to(tl.int64)) + rows
    inside = rows < N
    tl.store(to, pack_word0(merged, target_bits), mask=inside)
    store_counters(to + N, N, inside, merged, y_max, c0, c1, c2, False)
    if ENTROPY:
        store_counters(to + 4 * N.to(tl.int64), N, inside, merged, y_max, u0, u1, u2, True)


def projection_id(dtype: torch.dtype, device: torch.device) -> str:
    """Which chain makes the logits: the id that provenance states."""
    if dtype == torch.float32:
        return FMA_CHAIN
    if INTERPRETED or device.type != "cuda":
        return "triton-interpreter"
    if torch.version.hip is not None:
        return "triton-rocm-" + torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return HOPPER_K16 if (major, minor) == (9, 0) else f"triton-sm{major}{minor}"


def _weight_map(rows: Tensor, chunks: int, launch: LaunchConfig, quads: int = 4) -> TensorDescriptor:
    """64 * chunks rows of weight in quad order: position 64a + 8i + 2q + e reads row 64a + 16q + 2i + e, q < quads."""
    wv = rows.stride(0)
    return TensorDescriptor(
        rows,
        [chunks, 8, quads, 2, rows.shape[1]],
        [64 * wv, 2 * wv, 16 * wv, wv, 1],
        [launch.block_n // 64, 8, 4, 2, launch.block_k],
    )


def _weight_maps(
    weight: Tensor, columns: int, launch: LaunchConfig
) -> tuple[TensorDescriptor, TensorDescriptor | None, int]:
    """Maps of weight's whole blocks and of what is left, and how many columns the first covers."""
    V_local, D = weight.shape
    if V_local % 64 == 0 or columns <= V_local // launch.block_n * launch.block_n:
        whole = _weight_map(weight, V_local // 64, launch)  # past its end the copy engine gives zeros
        return whole, None, V_local
    mapped = V_local // launch.block_n * launch.block_n
    rest = weight[mapped:]
    if rest.shape[0] <= 64 and rest.shape[0] % 16 == 0:
        tail = _weight_map(rest, 1, launch, quads=rest.shape[0] // 16)
    else:
        padded = weight.new_zeros(launch.block_n, -(-D // 8) * 8)[:, :D]
        padded[: rest.shape[0]] = rest
        tail = _weight_map(padded, launch.block_n // 64, launch)
    return _weight_map(weight, mapped // 64, launch) if mapped else tail, tail, mapped


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: Tensor | float | None,
    problem: LocalProblem,
    *,
    want_logits: bool = False,
    keep: KeptLogits | None = None,
    launch: LaunchConfig | None = None,
    cut: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Records int64 [R, N] of this shard, and its fp32 logits [N, V_local] on request.

    hidden [N, D] and weight [V_local, D] of one dtype (fp32, bf16, fp16) and any strides; bias [V_local] or None;
    target_ids int64 [N] global; inv_temperature None, a float that fp32 holds, or fp32 [N]. `keep` (of new_kept) gets
    the logits of its rows. `launch` is for tests: it never changes bytes. cut int64 [N]: what a truncation keeps
    (vocabshard/sampling.py); logits are those before it. Enqueues on the current stream of the tensors' device, without
    a synchronisation.
    """
    (N, _), V_local = hidden.shape, weight.shape[0]
    # rows that start at 16 bytes, for the copy engine
    logits = torch.empty(N, -(-V_local // 4) * 4, device=hidden.device)[:, :V_local] if want_logits else None
    if keep is None:
        return _records(hidden, weight, bias, target_ids, inv_temperature, problem, logits, launch, cut), logits
    (kept,) = keep.tensors
    columns = kept.shape[1]
    parts = []
    for rows, to, width in ((slice(0, keep.rows), kept, columns), (slice(keep.rows, N), None, V_local)):
        scale = inv_temperature[rows] if isinstance(inv_temperature, Tensor) else inv_temperature
        own = None if bias is None else bias[:width]
        of_part = logits[rows] if logits is not None and to is None else to
        of_rows = None if cut is None else cut[rows]
        parts.append(
            _records(hidden[rows], weight[:width], own, target_ids[rows], scale, problem, of_part, launch, of_rows)
        )
    if logits is not None:
        logits[: keep.rows, :columns] = kept
        logits[: keep.rows, columns:] = float("-inf")
    return torch.cat(parts, 1), logits


def new_kept(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> KeptLogits:
    """The logits before temperature in fp32, so that a backward gives the same bytes with them and without."""
    return KeptLogits((torch.empty(rows, _kept_stride(columns), device=device)[:, :columns],))


def kept_bytes_per_row(columns: int, dtype: torch.dtype) -> int:
    """Of new_kept: fp32, whatever the operands are."""
    return 4 * _kept_stride(columns)


def _kept_stride(columns: int) -> int:
    """Rows of whole 64 bytes: wide loads and stores, also where they end."""
    return -(-columns // 16) * 16


def _records(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: Tensor | float | None,
    problem: LocalProblem,
    logits: Tensor | None,
    launch: LaunchConfig | None,
    cut: Tensor | None,
) -> Tensor:
    """Records int64 [R, N]; logits fp32 [N, V_local] or None is written too."""
    (N, D), V_local, device = hidden.shape, weight.shape[0], hidden.device
    columns = min(problem.valid, V_local) if logits is None else V_local
    if N == 0 or columns == 0:
        return identity_records(N, problem.entropy, device)

    chain = chain_of(hidden, weight)
    if launch is None:
        launch = launch_config(N, columns, D, chain, problem.softcap is not None, sm_count_of(device))
    hidden_map = weight_map = logits_map = tail_map = None
    mapped = V_local
    if chain == "descriptors":
        box = [launch.block_m, launch.block_k]
        hidden_map = TensorDescriptor(hidden, list(hidden.shape), list(hidden.stride()), box)
        weight_map, tail_map, mapped = _weight_maps(weight, columns, launch)
        if logits is not None:
            logits_map = TensorDescriptor(logits, [N, V_local], list(logits.stride()), [launch.block_m, 64])

    runs = launch.runs
    records = new_records(N, problem.entropy, device)
    parts = records if runs == 1 else torch.empty(runs, *records.shape, dtype=torch.int64, device=device)
    epilogue = epilogue_of(inv_temperature, problem)
    limit, last_equal = (None, None) if cut is None else cut_parts(cut)
    if last_equal is not None:  # as a column of this shard
        last_equal = (last_equal - problem.vocab_start).clamp(min=-1).to(torch.int32)
    with launching_on(device):
        linear_partials[(triton.cdiv(N, launch.block_m) * runs,)](
            hidden_map,
            weight_map,
            logits_map,
            tail_map,
            hidden,
            weight,
            bias,
            target_ids,
            epilogue.row_scale,
            limit,
            last_equal,
            parts,
            logits,
            N,
            min(problem.valid, V_local),
            V_local,
            mapped,
            D,
            problem.vocab_start,
            runs,
            launch.short_runs,
            launch.short_blocks,
            hidden.stride(0),
            hidden.stride(1),
            weight.stride(0),
            weight.stride(1),
            0 if bias is None else bias.stride(0),
            0 if logits is None else logits.stride(0),
            epilogue.scale,
            epilogue.cap,
            epilogue.cap_reciprocal,
            BM=launch.block_m,
            BN=launch.block_n,
            BK=launch.block_k,
            GROUP=launch.group_rows,
            FLATTEN=launch.flatten,
            CHAIN=chain,
            TAIL=tail_map is not None,
            BIAS=bias is not None,
            SOFTCAP=epilogue.softcap,
            TEMPERATURE=epilogue.temperature,
            LOGITS="none" if logits is None else "pointers" if logits_map is None else "descriptors",
            ENTROPY=problem.entropy,
            CUT=cut is not None,
            num_warps=launch.warps,
            num_stages=launch.stages,
            **({} if launch.max_registers is None else {"maxnreg": launch.max_registers}),
            enable_fp_fusion=False,
        )
        if runs > 1:
            BR, BS = merge_block(runs, N)
            merge_runs[(triton.cdiv(N, BR),)](
                parts, records, N, runs, BR=BR, BS=BS, ENTROPY=problem.entropy, num_warps=4, enable_fp_fusion=False
            )
    return records
