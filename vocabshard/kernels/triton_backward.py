"""Gradients of the linear head in Triton: for each block of the vocabulary dlogits, then the two products with it.

grad_hidden += dlogits @ weight is one ascending chain over the columns that goes on from block to block, so that a
row's bytes depend neither on the batch nor on the blocks; grad_weight = dlogits^T @ hidden is one ascending chain over
the rows. fp32 accumulators, no atomics. Scratch memory is bounded, whatever N and V (triton_config.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vocabshard.kernels.problem import ORDINARY, GradPlan, KeptLogits, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.kernels.triton_config import (
    KEPT,
    STRIDED,
    GradLaunch,
    LaunchConfig,
    ProductConfig,
    grad_launch,
    most_parts,
)
from vocabshard.kernels.triton_dlogits import add_parts, dlogits_block, inspect_rows
from vocabshard.kernels.triton_launch import Epilogue, chain_of, epilogue_of, launching_on, mappable, sm_count_of
from vocabshard.kernels.triton_products import product
from vocabshard.sampling import cut_parts

INSPECTED = 64  # rows of a program of inspect_rows
SUMMED = 256  # columns of a program of add_parts


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    grads: RowGrads,
    needs: Needs,
    how: GradPlan = ORDINARY,
    *,
    launch: GradLaunch | None = None,
    cut: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The kernel interface's backward (vocabshard/kernels/problem.py). Logits are made again, but for rows that were
    kept. cut int64 [N]: what a truncation keeps (vocabshard/sampling.py); other columns get and give nothing.

    Enqueues on the current stream of the tensors' device, without a synchronisation. `launch` is for tests: it changes
    no byte of grad_hidden and grad_weight.
    """
    N, D = hidden.shape
    columns = min(problem.valid, weight.shape[0])
    nothing = N * columns == 0
    grad_hidden = None
    if needs.hidden:
        grad_hidden = torch.zeros(N, D, device=hidden.device) if how.grad_hidden is None else how.grad_hidden
    grad_weight = torch.empty_like(weight) if needs.weight and how.main_grad is None else None
    grad_bias = torch.empty_like(bias) if needs.bias and bias is not None else None
    for grad in (grad_weight, grad_bias):
        if grad is not None:
            grad[0 if nothing else columns :].zero_()
    if nothing:
        if grad_hidden is not None:
            how.announce(grad_hidden)
        return grad_hidden, grad_weight, grad_bias

    chain = chain_of(hidden, weight)
    if launch is None:
        launch = grad_launch(
            N,
            columns,
            D,
            chain,
            hidden.element_size(),
            problem.softcap is not None,
            grad_bias is not None,
            sm_count_of(hidden.device),
        )
    rows_step, columns_step = min(launch.rows, N), min(launch.columns, columns)
    epilogue, limits = epilogue_of(inv_temperature, problem), (None, None) if cut is None else cut_parts(cut)
    call = _Call(hidden, weight, bias, target_ids, epilogue, problem, saved, grads, launch, *limits)
    new = hidden.new_empty
    buffer = new(rows_step, -(-columns_step // 16) * 16) if needs.hidden or needs.weight else None
    to_weight = how.main_grad if grad_weight is None else grad_weight
    # grad_weight's chains over several steps of rows; they are finished before they are rounded or added
    weight_sum = new(columns_step, D, dtype=torch.float32) if needs.weight and rows_step < N else None
    parts = most_parts(rows_step, launch.dlogits)
    sums = None if grad_bias is None else new(parts, columns_step, dtype=torch.float32)
    bias_sum = None if grad_bias is None else new(columns_step, dtype=torch.float32)
    with launching_on(hidden.device):
        inspected = _inspect(call) if needs.weight else None
        for first in range(0, columns, columns_step):
            block = slice(first, min(first + columns_step, columns))
            for row in range(0, N, rows_step):
                rows = slice(row, min(row + rows_step, N))
                dlogits = None if buffer is None else buffer[: rows.stop - row, : block.stop - first]
                done = _make_dlogits(call, rows, block, how.kept, dlogits, sums)
                if sums is not None and bias_sum is not None:
                    _sum_parts(sums[:done], bias_sum, block.stop - first, go_on=row > 0)
                if dlogits is None:
                    continue
                if grad_hidden is not None:
                    _add_to_hidden(call, dlogits, block, grad_hidden[rows])
                    if block.stop == columns and rows.stop == N:
                        how.announce(grad_hidden)
                if to_weight is not None and inspected is not None:
                    to = to_weight[block] if weight_sum is None else weight_sum[: block.stop - first]
                    add = weight_sum is None and how.main_grad is not None
                    _add_to_weight(call, dlogits, rows, inspected, to, go_on=row > 0, add=add)
            if to_weight is not None and weight_sum is not None:
                finished = weight_sum[: block.stop - first]
                if how.main_grad is None:
                    to_weight[block] = finished
                else:
                    to_weight[block] += finished
            if grad_bias is not None and bias_sum is not None:
                grad_bias[block] = bias_sum[: block.stop - first]
    return grad_hidden, grad_weight, grad_bias


@dataclass(frozen=True)
class _Call:
    """What the launches of one backward share."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target_ids: Tensor
    epilogue: Epilogue
    problem: LocalProblem
    saved: SavedRows
    grads: RowGrads
    launch: GradLaunch
    cut_logit: Tensor | None  # fp32 [N]
    cut_tie: Tensor | None  # int64 [N], global ids

    @property
    def entropy(self) -> bool:
        return self.grads.entropy is not None and self.saved.entropy is not None

    @property
    def chain(self) -> str:
        return chain_of(self.hidden, self.weight)


@dataclass(frozen=True)
class _Inspected:
    """Which rows have an upstream gradient, and whether the others could spoil a product."""

    keep: Tensor  # int8 [N]
    dirty: Tensor  # int32 [N / INSPECTED], not 0: there are rows without a gradient that hold inf or NaN


def _inspect(call: _Call) -> _Inspected:
    hidden, grads = call.hidden, call.grads
    N, D = hidden.shape
    programs = triton.cdiv(N, INSPECTED)
    keep = hidden.new_empty(N, dtype=torch.int8)
    dirty = hidden.new_empty(programs, dtype=torch.int32)
    inspect_rows[(programs,)](
        hidden,
        grads.target,
        grads.softmax,
        grads.entropy,
        keep,
        dirty,
        N,
        D,
        *hidden.stride(),
        ENTROPY=call.entropy,
        ROWS=INSPECTED,
        BK=64,
    )
    return _Inspected(keep, dirty)


def _map(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def _programs(tiles: int, residents: int, device: torch.device) -> tuple[int]:
    """As many as the chip holds at a time."""
    return (max(1, min(tiles, sm_count_of(device) * residents)),)


def _make_dlogits(
    call: _Call, rows: slice, block: slice, kept: KeptLogits | None, out: Tensor | None, sums: Tensor | None
) -> int:
    """dlogits [rows, block] into `out`, sums of its row blocks into `sums`: returns how many."""
    part = None if kept is None else kept.part(rows.start, rows.stop)
    if part is None:
        return _dlogits_of(call, call.launch.dlogits, rows, block, None, out, sums)
    there, rest = slice(rows.start, rows.start + part.rows), slice(rows.start + part.rows, rows.stop)
    of_there = None if out is None else out[: part.rows]
    done = _dlogits_of(call, KEPT, there, block, part.tensors[0][:, block], of_there, sums)
    if rest.start < rest.stop:
        of_rest = None if out is None else out[part.rows :]
        done += _dlogits_of(
            call, call.launch.dlogits, rest, block, None, of_rest, None if sums is None else sums[done:]
        )
    return done


def _dlogits_of(
    call: _Call,
    launch: LaunchConfig,
    rows: slice,
    block: slice,
    kept: Tensor | None,
    out: Tensor | None,
    sums: Tensor | None,
) -> int:
    epilogue, entropy = call.epilogue, call.entropy
    chain = call.chain if kept is None else "kept"
    hidden, weight = call.hidden[rows], call.weight[block]
    bias = None if call.bias is None else call.bias[block]
    (N, D), width = hidden.shape, weight.shape[0]
    hidden_map = weight_map = out_map = None
    if chain == "descriptors":
        hidden_map = _map(hidden, launch.block_m, launch.block_k)
        weight_map = _map(weight, launch.block_n, launch.block_k)
        out_map = None if out is None else _map(out, launch.block_m, launch.block_n // 2)

    def of_rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[rows]

    row_blocks = triton.cdiv(N, launch.block_m)
    tiles = row_blocks * triton.cdiv(width, launch.block_n)
    dlogits_block[_programs(tiles, launch.residents, hidden.device)](
        hidden_map,
        weight_map,
        out_map,
        hidden,
        weight,
        bias,
        kept,
        of_rows(call.target_ids),
        of_rows(epilogue.row_scale),
        of_rows(call.cut_logit),
        of_rows(call.cut_tie),
        of_rows(call.saved.lse2_int),
        of_rows(call.saved.lse2_frac),
        of_rows(call.saved.entropy) if entropy else None,
        of_rows(call.grads.target),
        of_rows(call.grads.softmax),
        of_rows(call.grads.entropy) if entropy else None,
        out,
        sums,
        N,
        width,
        D,
        call.problem.vocab_start + block.start,
        *hidden.stride(),
        *weight.stride(),
        0 if bias is None else bias.stride(0),
        0 if kept is None else kept.stride(0),
        0 if out is None else out.stride(0),
        0 if sums is None else sums.stride(0),
        epilogue.scale,
        epilogue.cap,
        epilogue.cap_reciprocal,
        BM=launch.block_m,
        BN=launch.block_n,
        BK=launch.block_k,
        GROUP=launch.group_rows,
        FLATTEN=launch.flatten,
        CHAIN=chain,
        BIAS=bias is not None,
        SOFTCAP=epilogue.softcap,
        TEMPERATURE=epilogue.temperature,
        ENTROPY=entropy,
        STORE=out is not None,
        CUT=call.cut_logit is not None,
        SUMS=sums is not None,
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=False,
    )
    return row_blocks


def _sum_parts(sums: Tensor, total: Tensor, width: int, *, go_on: bool) -> None:
    """The rows of sums [parts, width] in ascending order, added up in `total`."""
    programs = (triton.cdiv(width, SUMMED),)
    add_parts[programs](
        sums, total, sums.shape[0], width, sums.stride(0), BLOCK=SUMMED, GO_ON=go_on, enable_fp_fusion=False
    )


def _add_to_hidden(call: _Call, dlogits: Tensor, block: slice, out: Tensor) -> None:
    """out fp32 [rows, D]: chains that go on with dlogits @ weight[block]."""
    maps = call.chain == "descriptors"
    _multiply(dlogits, call.weight[block], out, call.launch.of_hidden, maps, a_rows_are_k=False, go_on=True)


def _add_to_weight(
    call: _Call, dlogits: Tensor, rows: slice, inspected: _Inspected, out: Tensor, *, go_on: bool, add: bool
) -> None:
    """out [block, D] = dlogits^T @ hidden[rows], or added to it; rows without a gradient may hold anything."""
    hidden, config = call.hidden[rows], call.launch.of_weight
    inspected = _Inspected(inspected.keep[rows], inspected.dirty)
    if call.chain == "descriptors":
        # the copy engine cannot select rows: where there is need, the other launch does the work, and only there
        _multiply(dlogits, hidden, out, config, True, True, inspected, "clean", go_on=go_on, add=add)
        _multiply(dlogits, hidden, out, STRIDED, False, True, inspected, "dirty", go_on=go_on, add=add)
    else:
        _multiply(dlogits, hidden, out, config, False, True, inspected, go_on=go_on, add=add)


def _multiply(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    config: ProductConfig,
    maps: bool,
    a_rows_are_k: bool,
    inspected: _Inspected | None = None,
    when: str = "always",
    *,
    go_on: bool = False,
    add: bool = False,
) -> None:
    """out [M, N] = a @ b[K, N], a being [M, K], or [K, M] where its rows are k (see `product`)."""
    (M, N), K = out.shape, b.shape[0]
    steps = a.stride()
    a_map = b_map = out_map = None
    if maps:
        box = (config.block_k, config.block_m) if a_rows_are_k else (config.block_m, config.block_k)
        a_map, b_map = _map(a, *box), _map(b, config.block_k, config.block_n)
        if mappable(out):
            out_map = _map(out, config.block_m, 64 if out.dtype == torch.float32 else config.block_n)
    tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    product[_programs(tiles, config.residents, out.device)](
        a_map,
        b_map,
        out_map,
        a,
        b,
        out,
        None if inspected is None else inspected.keep,
        None if inspected is None else inspected.dirty,
        M,
        N,
        K,
        0 if inspected is None else inspected.dirty.shape[0],
        *(reversed(steps) if a_rows_are_k else steps),
        *b.stride(),
        *out.stride(),
        BM=config.block_m,
        BN=config.block_n,
        BK=config.block_k,
        # grad_hidden's tiles share strips of both operands; grad_weight's are stored row by row of the whole
        GROUP=1 if a_rows_are_k else 8,
        # accumulators that are loaded would stop a pipeline across tiles
        FLATTEN=config.flatten and not go_on,
        MAPS=maps,
        A_ROWS_ARE_K=a_rows_are_k,
        KEEP=inspected is not None,
        WHEN=when,
        OUT_MAP=out_map is not None,
        GO_ON=go_on,
        ADD=add,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=False,
    )
