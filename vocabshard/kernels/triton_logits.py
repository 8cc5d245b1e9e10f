"""Logits that exist [N_rows, V_local] -> records, and their gradient, in Triton: one read; one read and one write.

A lane owns whole 16-column tiles, read as 16-byte pieces, and keeps a partial of its own until its run of columns is
over. `rows` says which row of the logits each output row reads.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocabshard.kernels.problem import LocalProblem, RowGrads, SavedRows
from vocabshard.kernels.triton_config import logits_launch, merge_block
from vocabshard.kernels.triton_partials import add_to_partials, merge_runs, store_counters
from vocabshard.partials import identity_records, new_records
from vocabshard.triton_contract import (
    INTERPRETED,
    LIMIT,
    LN2_F32,
    LOG2E,
    MAGIC,
    NAN_BITS,
    bits,
    canonical_bits,
    constant,
    exp_poly,
    fma,
    from_bits,
    max_nan,
    pack_word0,
)

TINY = constant(-125.0)  # binary exponent from which a probability counts as 0
BACKWARD_COLUMNS = 2048


@triton.jit
def joined(a, b):
    """Columns of a, then those of b."""
    return tl.join(a, b).trans(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def load_piece(at, left, OFFSET: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Elements 16 t + OFFSET ... + WIDTH - 1 of each lane t, fp32; -inf from the `left`-th element on."""
    place = 16 * tl.arange(0, at.shape[0])[:, None] + (OFFSET + tl.arange(0, WIDTH))[None, :]
    pieces = at[:, None] + place
    if MASKED:
        return tl.load(pieces, mask=place < left, other=float("-inf")).to(tl.float32)
    else:
        return tl.load(pieces).to(tl.float32)


@triton.jit
def load_tiles(at, left, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """A tile a lane, [lanes, 16]; `at` the pointer of the first one's first column, once a lane."""
    a, b = load_piece(at, left, 0, WIDTH, MASKED), load_piece(at, left, WIDTH, WIDTH, MASKED)
    if WIDTH == 8:
        return joined(a, b)
    else:
        c, d = load_piece(at, left, 8, WIDTH, MASKED), load_piece(at, left, 12, WIDTH, MASKED)
        return joined(joined(a, b), joined(c, d))


@triton.jit
def add_step(
    at, left, scale, y_max, clamp_matters, c0, c1, c2, u0, u1, u2,
    LANES: tl.constexpr, UNROLL: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """LANES * UNROLL tiles from pointer `at` on, `left` columns of which are there."""
    at = at + tl.zeros([LANES], tl.int32)
    y = load_tiles(at, left, WIDTH, MASKED)
    if UNROLL == 2:
        y = joined(y, load_tiles(at + 16 * LANES, left - 16 * LANES, WIDTH, MASKED))
    if SCALED:
        y *= scale
    if MASKED and SCALED:  # a bad temperature makes columns NaN, but not those that are no columns
        place = 16 * tl.arange(0, LANES)[:, None] + tl.arange(0, 16)[None, :]
        if UNROLL == 2:
            place = joined(place, place + 16 * LANES)
        y = tl.where(place < left, y, float("-inf"))
    tiles = y.reshape(LANES, 1, UNROLL, 16)
    return add_to_partials(tiles, y_max, clamp_matters, c0, c1, c2, u0, u1, u2, UNROLL, ENTROPY)


@triton.jit(do_not_specialize=["N_rows", "outputs", "valid", "vocab_start", "runs"])
def logits_partials(
    logits,
    rows,
    target_ids,
    inv_temperature,
    records,
    N_rows,
    outputs,
    valid,
    vocab_start,
    runs,
    stride,
    scale,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of 16 bytes
    TEMPERATURE: tl.constexpr,  # "none", "scalar" or "rows"
    ROWS: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Records of rows of logits that exist."""
    STEP: tl.constexpr = 16 * LANES * UNROLL
    SCALED: tl.constexpr = TEMPERATURE != "none"
    out = (tl.program_id(0) // runs).to(tl.int64)
    run = tl.program_id(0) % runs
    source = out
    exists = True
    if ROWS:
        source = tl.load(rows + out)
        exists = (source >= 0) & (source < N_rows)
        source = tl.where(exists, source, 0)
    row = logits + source * stride
    if TEMPERATURE == "rows":
        scale = tl.load(inv_temperature + out)
    steps = tl.cdiv(valid, STEP)
    first = (run.to(tl.int64) * steps // runs).to(tl.int32)
    last = ((run.to(tl.int64) + 1) * steps // runs).to(tl.int32)

    y_max = tl.full([LANES, 1], float("-inf"), tl.float32)
    c0 = tl.zeros([LANES, 1], tl.int64)
    c1, c2, u0, u1, u2 = c0, c0, c0, c0, c0
    clamp_matters = 1
    for step in range(first, tl.minimum(last, valid // STEP)):
        y_max, clamp_matters, c0, c1, c2, u0, u1, u2 = add_step(
            row + step * STEP, valid, scale, y_max, clamp_matters, c0, c1, c2, u0, u1, u2,
            LANES, UNROLL, WIDTH, False, SCALED, ENTROPY,
        )  # fmt: skip
    if last * STEP > valid:
        step = last - 1
        y_max, clamp_matters, c0, c1, c2, u0, u1, u2 = add_step(
            row + step * STEP, valid - step * STEP, scale, y_max, clamp_matters, c0, c1, c2, u0, u1, u2,
            LANES, UNROLL, WIDTH, True, SCALED, ENTROPY,
        )  # fmt: skip

    target = tl.load(target_ids + out) - vocab_start
    here = (target >= first.to(tl.int64) * STEP) & (target < tl.minimum(last.to(tl.int64) * STEP, valid)) & exists
    y = tl.load(row + target, mask=here, other=0.0).to(tl.float32)
    if SCALED:
        y *= scale
    nan = from_bits(tl.full([1], NAN_BITS, tl.int32))
    merged = tl.reduce(y_max, 0, max_nan)
    merged = tl.where(exists, merged, nan)
    at = records + run.to(tl.int64) * ((7 if ENTROPY else 4) * outputs.to(tl.int64)) + out + tl.arange(0, 1)
    tl.store(at, pack_word0(merged, tl.where(here, canonical_bits(y), NAN_BITS)))
    # lanes of the one row
    y_max = y_max.reshape(1, LANES)
    store_counters(at + outputs, outputs, True, merged, y_max, c0.reshape(1, LANES), c1.reshape(1, LANES),
                   c2.reshape(1, LANES), False)  # fmt: skip
    if ENTROPY:
        store_counters(at + 4 * outputs.to(tl.int64), outputs, True, merged, y_max, u0.reshape(1, LANES),
                       u1.reshape(1, LANES), u2.reshape(1, LANES), True)  # fmt: skip


def _temperature(inv_temperature: Tensor | float | None) -> tuple[str, float, Tensor | None]:
    if inv_temperature is None:
        return "none", 1.0, None
    if isinstance(inv_temperature, Tensor):
        return "rows", 1.0, inv_temperature
    return "scalar", float(inv_temperature), None


def _on_device(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def logits_forward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    rows: Tensor | None = None,
    *,
    launch: tuple[int, int, int] | None = None,
) -> Tensor:
    """logits [N_rows, V_local] of column stride 1 -> records int64 [R, M]; output row m reads row rows[m], or m.

    target_ids int64 [M] global; inv_temperature None, a float that fp32 holds, or fp32 [M]. A row that does not exist
    gives a poisoned record, and nothing is read. `launch`, for tests, is logits_launch's result: it changes no byte.
    """
    outputs, valid = target_ids.shape[0], min(problem.valid, logits.shape[1])
    if outputs == 0 or valid == 0:
        return identity_records(outputs, problem.entropy, logits.device)
    if logits.shape[0] == 0:
        raise ValueError(f"the logits have no rows, {outputs} are asked for")
    if launch is None:
        sm_count = 1 if INTERPRETED else torch.cuda.get_device_properties(logits.device).multi_processor_count
        launch = logits_launch(outputs, valid, sm_count)
    warps, unroll, runs = launch
    records = new_records(outputs, problem.entropy, logits.device)
    parts = records if runs == 1 else torch.empty(runs, *records.shape, dtype=torch.int64, device=logits.device)
    temperature, scale, row_scale = _temperature(inv_temperature)
    with _on_device(logits):
        logits_partials[(outputs * runs,)](
            logits,
            rows,
            target_ids,
            row_scale,
            parts,
            logits.shape[0],
            outputs,
            valid,
            problem.vocab_start,
            runs,
            logits.stride(0),
            scale,
            LANES=32 * warps,
            UNROLL=unroll,
            WIDTH=16 // logits.element_size(),
            TEMPERATURE=temperature,
            ROWS=rows is not None,
            ENTROPY=problem.entropy,
            num_warps=warps,
            enable_fp_fusion=False,
        )
        if runs > 1:
            BR, BS = merge_block(runs, outputs)
            merge_runs[(triton.cdiv(outputs, BR),)](
                parts, records, outputs, runs, BR=BR, BS=BS, ENTROPY=problem.entropy, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
    return records


@triton.jit(do_not_specialize=["N_rows", "V_local", "valid", "vocab_start"])
def logits_gradients(
    logits,
    out,
    starts,
    readers,
    target_ids,
    inv_temperature,
    lse2_int,
    lse2_frac,
    row_entropy,
    grad_target,
    grad_softmax,
    grad_entropy,
    N_rows,
    V_local,
    valid,
    vocab_start,
    stride,
    out_stride,
    scale,
    COLUMNS: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    ROWS: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """The gradient of logits that exist, row by row."""
    blocks = tl.cdiv(V_local, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    whole = first + COLUMNS <= valid  # then no mask keeps the accesses from being wide
    if whole:
        z = tl.load(logits + row * stride + columns).to(tl.float32)
    else:
        z = tl.load(logits + row * stride + columns, mask=columns < valid, other=0.0).to(tl.float32)
    if ROWS:
        total = tl.zeros([COLUMNS], tl.float32)
        for i in range(tl.load(starts + row), tl.load(starts + row + 1)):
            reader = tl.load(readers + i)
            total += gradient_of(
                z, reader, columns, target_ids, inv_temperature, lse2_int, lse2_frac, row_entropy, grad_target,
                grad_softmax, grad_entropy, vocab_start, scale, TEMPERATURE, ENTROPY,
            )  # fmt: skip
    else:
        total = gradient_of(
            z, row, columns, target_ids, inv_temperature, lse2_int, lse2_frac, row_entropy, grad_target,
            grad_softmax, grad_entropy, vocab_start, scale, TEMPERATURE, ENTROPY,
        )  # fmt: skip
    if whole:
        tl.store(out + row * out_stride + columns, total.to(out.dtype.element_ty))
    else:
        total = tl.where(columns < valid, total, 0.0)
        tl.store(out + row * out_stride + columns, total.to(out.dtype.element_ty), mask=columns < V_local)


@triton.jit
def gradient_of(
    z, reader, columns, target_ids, inv_temperature, lse2_int, lse2_frac, row_entropy, grad_target, grad_softmax,
    grad_entropy, vocab_start, scale, TEMPERATURE: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """What output row `reader` sends to the logits z of the row it read: csrc/cpu/softmax.h, step for step."""
    target = tl.load(target_ids + reader) - vocab_start
    target = tl.where((target >= 0) & (target < 2147483647), target, -1).to(tl.int32)
    to_target, to_softmax = tl.load(grad_target + reader), tl.load(grad_softmax + reader)
    whole, frac = tl.load(lse2_int + reader).to(tl.float32), tl.load(lse2_frac + reader)
    active = (to_target != 0.0) | (to_softmax != 0.0)
    if ENTROPY:
        to_entropy, entropy = tl.load(grad_entropy + reader), tl.load(row_entropy + reader)
        active = active | (to_entropy != 0.0)
    poisoned = frac != frac
    row_scale = exp_poly(0.0 - frac)
    y = z
    if TEMPERATURE == "rows":
        scale = tl.load(inv_temperature + reader)
    if TEMPERATURE != "none":
        y = z * scale
    # p = P(f) 2^(k - lse2_int) 2^-lse2_frac: as accurate where p is small as where it is large
    limited = tl.where(y < -LIMIT, -LIMIT, y)
    k = fma(limited, LOG2E, MAGIC + tl.zeros_like(y)) - MAGIC
    f = fma(limited, LOG2E, -k)
    n = k - whole
    vanishes = n < TINY
    power = exp_poly(f) * row_scale
    shift = bits(tl.where(vanishes, 0.0, n) + MAGIC) << 23
    p = tl.where(vanishes, 0.0, from_bits(bits(power) + shift))
    share = to_softmax + tl.zeros_like(y)
    if ENTROPY:  # log p + H, the large parts first: they cancel
        log_p = fma(
            f - frac, LN2_F32 + tl.zeros_like(y), fma(n, LN2_F32 + tl.zeros_like(y), entropy + tl.zeros_like(y))
        )
        share = to_softmax - to_entropy * log_p
    dz = fma(p, share, tl.where(columns == target, to_target, 0.0))
    if TEMPERATURE != "none":
        dz *= scale
    dz = tl.where(y == float("-inf"), 0.0, dz)
    dz = tl.where(poisoned, frac, dz)
    return tl.where(active, dz, 0.0)


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
    The same bytes as the CPU kernels write.
    """
    N_rows, V_local = out.shape
    if N_rows == 0 or V_local == 0:
        return
    starts = readers = None
    if rows is not None:
        read, readers = torch.sort(rows, stable=True)
        starts = torch.searchsorted(read, torch.arange(N_rows + 1, device=rows.device))
    entropy = grads.entropy is not None and saved.entropy is not None
    temperature, scale, row_scale = _temperature(inv_temperature)
    saved_entropy, grad_entropy = (saved.entropy, grads.entropy) if entropy else (None, None)
    columns = min(BACKWARD_COLUMNS, max(64, triton.next_power_of_2(V_local)))
    with _on_device(logits):
        logits_gradients[(N_rows * triton.cdiv(V_local, columns),)](
            logits,
            out,
            starts,
            readers,
            target_ids,
            row_scale,
            saved.lse2_int.contiguous(),
            saved.lse2_frac.contiguous(),
            None if saved_entropy is None else saved_entropy.contiguous(),
            grads.target.contiguous(),
            grads.softmax.contiguous(),
            None if grad_entropy is None else grad_entropy.contiguous(),
            N_rows,
            V_local,
            min(problem.valid, V_local),
            problem.vocab_start,
            logits.stride(0),
            out.stride(0),
            scale,
            COLUMNS=columns,
            TEMPERATURE=temperature,
            ROWS=rows is not None,
            ENTROPY=entropy,
            num_warps=4,
            enable_fp_fusion=False,
        )
