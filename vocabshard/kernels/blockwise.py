"""Gradients of the local logits block by block in torch operations, for backends without a backward of their own.

Logits are recomputed for a block of rows and columns with fp32 accumulation (or read, without bias, where the forward
kept them: [rows, columns]), `dlogits` is formed in fp32 from the saved lse2 pair, and two matrix products add it to
grad_hidden (fp32) and grad_weight. Scratch memory is bounded, whatever N and V. The library's products are not the
contract's chain: by them gradients, unlike log-probs, promise equal bytes from run to run only. A kernel module whose
forward has a chain gives its own: at an offset of 1e4 a logit that is rounded the other way is off by 1e-3, and so is
its p.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from vocabshard.contract import LN2, LOG2E
from vocabshard.kernels.problem import ORDINARY, GradPlan, LocalProblem, Needs, RowGrads, SavedRows

P = ParamSpec("P")
R = TypeVar("R")

SCRATCH_ELEMENTS = 1 << 24  # logits of a block: 64 MiB a tensor in fp32
ROWS = 4096


class Products(NamedTuple):
    """How a block's logits are made, and what is added to the gradients."""

    logits: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # hidden, weight, bias -> fp32, before soft-cap
    add_product: Callable[[Tensor, Tensor, Tensor], None]  # to [M, C] += a [M, K] @ b [K, C], all of one dtype


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The operands have their dtypes; autocast, active in the thread that runs this, shall not change the products'."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


@without_autocast
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
    products: Products | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The kernel interface's backward (vocabshard/kernels/problem.py). `products` stands for the library's, of fp32
    operands."""
    logits, add_product = (_logits, add_library_product) if products is None else products
    n, d = hidden.shape
    active = active_rows(grads)
    # rows that count for nothing must not reach grad_weight, whatever they hold
    hidden = torch.where(active[:, None], hidden, torch.zeros((), dtype=hidden.dtype, device=hidden.device))
    grad_hidden = how.grad_hidden
    if needs.hidden and grad_hidden is None:
        grad_hidden = hidden.new_zeros(n, d, dtype=torch.float32)
    grad_weight = torch.zeros_like(weight) if needs.weight and how.main_grad is None else None
    grad_bias = torch.zeros_like(bias) if needs.bias and bias is not None else None
    rows_step, columns_step = block(n, d)
    for v in range(0, problem.valid, columns_step):
        columns = slice(v, min(v + columns_step, problem.valid))
        width = columns.stop - v
        block_bias = None if bias is None else bias[columns]
        weight_sum = hidden.new_zeros(width, d, dtype=torch.float32) if needs.weight else None
        bias_sum = hidden.new_zeros(width, dtype=torch.float32) if grad_bias is not None else None
        for rows in row_blocks(n, rows_step, 0 if how.kept is None else how.kept.rows):
            if how.kept is not None and rows.stop <= how.kept.rows:
                z = how.kept.tensors[0][rows, columns].float()
                z = z if block_bias is None else z + block_bias.float()  # kept logits stay as they are
            else:
                z = logits(hidden[rows], weight[columns], block_bias)
            scale = inv_temperature[rows, None] if isinstance(inv_temperature, Tensor) else inv_temperature
            dz = dlogits(z, scale, problem, v, rows, target_ids, saved, grads, active)
            if bias_sum is not None:
                bias_sum += dz.sum(0)
            dz = dz.to(hidden.dtype)
            if grad_hidden is not None:
                add_product(grad_hidden[rows], dz, weight[columns])
                if columns.stop == problem.valid and rows.stop == n:
                    how.announce(grad_hidden)
            if weight_sum is not None:
                add_product(weight_sum, dz.t(), hidden[rows])
        if weight_sum is not None and how.main_grad is not None:
            how.main_grad[columns] += weight_sum
        elif weight_sum is not None and grad_weight is not None:
            grad_weight[columns] = weight_sum.to(weight.dtype)
        if grad_bias is not None and bias_sum is not None:
            grad_bias[columns] = bias_sum.to(grad_bias.dtype)
    if grad_hidden is not None and n * problem.valid == 0:
        how.announce(grad_hidden)
    return grad_hidden, grad_weight, grad_bias


def block(n: int, d: int) -> tuple[int, int]:
    """Rows and columns at a time: the logits' block and the fp32 sum of grad_weight's both hold SCRATCH_ELEMENTS."""
    rows = min(ROWS, max(n, 1))
    return rows, max(16, SCRATCH_ELEMENTS // max(rows, d) // 16 * 16)


def row_blocks(n: int, step: int, kept: int) -> list[slice]:
    """At most `step` rows each, a boundary at `kept`."""
    cuts = sorted({*range(0, kept, step), *range(kept, n, step), n})
    return [slice(first, stop) for first, stop in itertools.pairwise(cuts)]


def active_rows(grads: RowGrads) -> Tensor:
    """bool [N]: rows with any upstream gradient."""
    active = (grads.target != 0) | (grads.softmax != 0)
    return active if grads.entropy is None else active | (grads.entropy != 0)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = product(hidden, weight.t())
    return z if bias is None else z.add_(bias.float())


def add_library_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    """to [M, C] += a [M, K] @ b [K, C]."""
    to += product(a, b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32, half-precision operands multiplied on the tensor cores where torch can keep the accumulator."""
    if a.dtype == torch.float32:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def dlogits(
    z: Tensor,
    scale: float | Tensor | None,
    problem: LocalProblem,
    first_column: int,
    rows: slice,
    target_ids: Tensor,
    saved: SavedRows,
    grads: RowGrads,
    active: Tensor,
) -> Tensor:
    """dL/dz fp32 of a block, from the chain's logits with bias; exact zeros as the kernel interface asks for them."""
    slope = None
    if problem.softcap is not None:
        tanh = torch.tanh(z / problem.softcap)
        finite = torch.isfinite(z)
        slope = torch.where(finite, 1 - tanh * tanh, 0.0)
        z = torch.where(finite, problem.softcap * tanh, z)
    y = z if scale is None else z * scale
    masked = torch.isneginf(y)
    # log2 p through fp64: a long way from zero an fp32 difference would lose the digits of p
    log2_p = (y.double() * LOG2E - saved.lse2_int[rows, None] - saved.lse2_frac[rows, None].double()).float()
    p = torch.exp2(log2_p)
    inner = grads.softmax[rows, None]
    if grads.entropy is not None and saved.entropy is not None:
        inner = inner - grads.entropy[rows, None] * (log2_p * LN2 + saved.entropy[rows, None])
    dz = torch.where(masked, 0.0, p * inner)
    local = target_ids[rows] - problem.vocab_start - first_column
    here = (local >= 0) & (local < z.shape[1])
    index = torch.where(here, local, 0)[:, None]
    here = here & ~masked.gather(1, index)[:, 0]
    dz.scatter_add_(1, index, torch.where(here, grads.target[rows], 0.0)[:, None])
    if scale is not None:
        dz = dz * scale
    if slope is not None:
        dz = dz * slope
    dz = torch.where(torch.isnan(saved.lse2_frac[rows, None]), float("nan"), dz)
    return torch.where(active[rows, None], dz, 0.0)
