"""The Hopper backward: the gradient of the logits for a block of the vocabulary at a time, and its products.

For a block of columns, logits are recomputed by the forward's own main loop and their gradient is formed in fp32 from
the saved lse2 pair, rounded once to the operands' dtype and stored; two products take it to grad_hidden and
grad_weight. Of rows that the forward kept (sm90_kept.py) it is formed from what was kept, and where all were and nobody
will read them again, in their place and as one block: a truncation is in them. Scratch memory is bounded by
WORKSPACE, whatever N and V. No byte depends on how the blocks are cut, and a row of grad_hidden not on the batch.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from vocabshard.kernels import blockwise, sm90_turned
from vocabshard.kernels.problem import (
    ORDINARY,
    GradPlan,
    KeptLogits,
    LocalProblem,
    Needs,
    RowGrads,
    SavedRows,
)
from vocabshard.kernels.sm90_cut import COLUMNS, ROWS, Blocks
from vocabshard.kernels.sm90_cut import MOST_ROWS as MOST_ROWS
from vocabshard.kernels.sm90_cut import cut as cut_into_blocks
from vocabshard.kernels.sm90_fma import FMA_CHAIN
from vocabshard.kernels.sm90_inputs import for_tma, plain_strides, readable_by_tma
from vocabshard.kernels.sm90_products import grad_hidden as add_grad_hidden
from vocabshard.kernels.sm90_products import grad_weight as add_grad_weight
from vocabshard.kernels.sm90_terms import RowTerms, add_up_sums

WORKSPACE = 256 << 20  # bytes beside the gradients
# The tensor core cuts every sum off at fp32, always towards zero: over a whole vocabulary that adds up to as much as
# fp16's own rounding (bf16's is eight times that). So grad_hidden of fp16 is a sum of chains of so many columns, unless
# it has to go on from another rank's.
SHORT_CHAIN = 10 * COLUMNS
_ROUNDED_FROM = 1024  # rows


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
    cut: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The kernel interface's backward (vocabshard/kernels/problem.py). fp32 is taken by blockwise.py with products of
    FMA chains, and with a cut by sm90.py; 16-bit operands that TMA can't read are copied to where it can, the weight a
    block at a time. cut int64 [N]: what a truncation keeps (vocabshard/sampling.py); other columns get and give
    nothing."""
    hidden, weight = plain_strides(hidden), plain_strides(weight)
    n, d = hidden.shape
    columns = problem.valid
    if hidden.dtype == torch.float32 or n == 0 or columns == 0:
        products = FMA_CHAIN if hidden.dtype == torch.float32 else None
        return blockwise.backward(
            hidden, weight, bias, target_ids, inv_temperature, problem, saved, grads, needs, how, products=products
        )
    device = hidden.device
    how = _in_columns(how)
    if not readable_by_tma(hidden):
        hidden = for_tma(hidden)
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    grad_hidden = grad_weight = grad_bias = None
    if needs.weight:
        grad_weight = how.main_grad
        if grad_weight is None:
            grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            if columns < len(weight):
                grad_weight[columns:].zero_()
    if needs.bias and bias is not None:
        grad_bias = torch.zeros_like(bias)

    terms = RowTerms(hidden, target_ids, inv_temperature, problem, saved, grads, needs.weight, cut)
    pairs = max(torch.cuda.get_device_properties(device).multi_processor_count // 2, 1)
    # columns of a chain of grad_hidden's, 0: all
    chains = SHORT_CHAIN if hidden.dtype == torch.float16 and how.grad_hidden is None else 0
    in_place = how.kept is not None and how.last_use and how.kept.rows == n
    turned = in_place and grad_weight is not None and grad_bias is None and sm90_turned.pays(n, d, columns, pairs)
    if in_place and how.kept is not None:
        blocks = Blocks(n, (0, columns))
        if turned:
            dlogits = how.kept.tensors[0].view(hidden.dtype)
        else:
            dlogits = terms.of_all_kept(how.kept, columns, grad_bias)
    else:
        # so few rows at a time that a block holds a chain
        most_rows, step = (16384 if d <= 8192 else 2048, SHORT_CHAIN) if chains else (MOST_ROWS, COLUMNS)
        blocks = cut_into_blocks(
            n, d, columns, WORKSPACE - terms.bytes, pairs, most_rows, not readable_by_tma(weight), step
        )
        width = max(-(-(b - a) // 64) * 64 for a, b in itertools.pairwise(blocks.columns))
        dlogits = torch.empty(blocks.rows, width, dtype=hidden.dtype, device=device)
    width = dlogits.shape[1]
    sums = None
    if grad_bias is not None and not in_place:
        sums = torch.empty(-(-n // ROWS), width, dtype=torch.float32, device=device)
    if needs.hidden:
        grad_hidden = how.grad_hidden
        if grad_hidden is None:
            # where its fp32 would be much memory beside what was kept
            at_once = how.rounded_hidden and in_place and n >= _ROUNDED_FROM
            grad_hidden = torch.empty(n, d, dtype=hidden.dtype if at_once else torch.float32, device=device)
    if turned and grad_weight is not None and how.kept is not None:

        def complete(dz: Tensor) -> None:
            if grad_hidden is None:
                return
            for part in how.ready_rows or (slice(0, n),):
                to = grad_hidden[part]
                go_on = how.grad_hidden is not None
                add_grad_hidden(dz[part], weight[:columns], to, go_on=go_on, row_active=terms.active[part])
                if how.hidden_ready is not None:
                    how.hidden_ready(to)

        add = how.main_grad is not None
        sm90_turned.grad_weight_in_blocks(terms, how.kept, grad_weight, columns, pairs, add, complete)
        return grad_hidden, None if add else grad_weight, grad_bias
    in_pieces = blocks.rows < n
    chain = torch.empty(width, d, dtype=torch.float32, device=device) if in_pieces and needs.weight else None
    for start, stop in itertools.pairwise(blocks.columns):
        block_weight = weight[start:stop]
        if not readable_by_tma(block_weight):
            block_weight = for_tma(block_weight)
        for first in range(0, n, blocks.rows):
            rows = slice(first, min(first + blocks.rows, n))
            last = rows.stop == n
            if in_place:
                dz = dlogits[:, :columns]
            else:
                dz = terms.block(rows, start, block_weight, bias, how.kept, dlogits, sums)
            if grad_hidden is not None:
                go_on = start > 0 or how.grad_hidden is not None
                in_parts = stop == columns and not in_pieces and how.hidden_ready is not None and how.ready_rows
                for part in how.ready_rows if in_parts else (rows,):
                    to = grad_hidden[part]
                    of_part = dz if part is rows else dz[part]
                    if chains == 0:
                        add_grad_hidden(of_part, block_weight, to, go_on=go_on, row_active=terms.active[part])
                    for v in range(0, stop - start, chains) if chains else ():
                        one, its_weight = of_part[:, v : v + chains], block_weight[v : v + chains]
                        add = start + v > 0
                        add_grad_hidden(one, its_weight, to, go_on=False, add=add, row_active=terms.active[part])
                    if in_parts and how.hidden_ready is not None:
                        how.hidden_ready(to)
                if last and stop == columns and not in_parts:
                    how.announce(grad_hidden)
            if grad_weight is not None:
                so_far = None if chain is None else chain[: stop - start]
                add_grad_weight(
                    dz,
                    hidden[rows],
                    grad_weight[start:stop] if last or so_far is None else so_far,
                    go_on_from=so_far if first > 0 else None,
                    add=last and how.main_grad is not None,
                    row_mask=terms.broken[first // 64 :],
                )
        if sums is not None and grad_bias is not None:
            add_up_sums(sums, grad_bias[start:stop])
    return grad_hidden, None if how.main_grad is not None else grad_weight, grad_bias


def _in_columns(how: GradPlan) -> GradPlan:
    """References that were saved elsewhere and brought back may lie by rows: they are laid as new_kept lays them."""
    if how.kept is None or how.kept.rows == 1 or how.kept.tensors[1].stride(0) == 1:
        return how
    codes, references, target_y = how.kept.tensors
    return replace(how, kept=KeptLogits((codes, references.t().contiguous().t(), target_y)))
