"""The Hopper backward that makes its logits again, launched as a whole: with few rows its cost is the host's.

The same kernels, blocks and bytes as sm90_backward.py's, which takes what this does not: operands that have to be
copied, kept logits, accumulators of another rank's, blocks of rows, parts of grad_hidden.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels import sm90_backward as by_blocks
from vocabshard.kernels.problem import GradPlan, LocalProblem, Needs, SavedRows, Upstream
from vocabshard.kernels.sm90_cut import COLUMNS, cut
from vocabshard.kernels.sm90_inputs import ELEMENTS, addressable

_TERMS_BYTES = 33  # of a row, and 8 of every 64: what sm90_backward.py takes off its workspace


@functools.cache
def _pairs(device: int) -> int:
    return max(torch.cuda.get_device_properties(device).multi_processor_count // 2, 1)


@functools.lru_cache(maxsize=64)
def _blocks(
    n: int, d: int, columns: int, workspace: int, pairs: int, most_rows: int, chains: int, bias: bool
) -> tuple[list[int], int, int]:
    """Ends of the blocks of columns, columns of the widest in whole groups, bytes of workspace; no ends where rows are
    cut too."""
    if chains:
        most_rows = 16384 if d <= 8192 else 2048
    step = chains or COLUMNS
    blocks = cut(n, d, columns, workspace - _TERMS_BYTES * n - 8 * -(-n // 64), pairs, most_rows, False, step)
    width = max(-(-(b - a) // 64) * 64 for a, b in itertools.pairwise(blocks.columns))
    ends = [] if blocks.rows < n else list(blocks.columns[1:])
    return ends, width, _C.sm90_backward_workspace(n, width, bias)


def backward_upstream(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    upstream: Upstream,
    needs: Needs,
    how: GradPlan,
    ignore_index: int,
    real_vocab_size: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    """The kernel interface's (vocabshard/kernels/problem.py); None: not these operands, not so."""
    (n, d), columns, device = hidden.shape, problem.valid, hidden.device
    element, (row, column), (weight_row, weight_column) = ELEMENTS[hidden.dtype], hidden.stride(), weight.stride()
    hidden_at, weight_at, index = hidden.data_ptr(), weight.data_ptr(), device.index
    main_grad = how.main_grad if needs.weight else None
    if (
        element == 2
        or n == 0
        or columns == 0
        or d % 8 != 0
        or how.kept is not None
        or how.grad_hidden is not None
        or how.ready_rows
        or not addressable(hidden_at, row, column)
        or not addressable(weight_at, weight_row, weight_column)
        or (bias is not None and bias.stride(0) != 1)
        or (main_grad is not None and main_grad.data_ptr() % 16 != 0)
    ):
        return None
    chains = by_blocks.SHORT_CHAIN if element == 1 else 0
    with_bias = needs.bias and bias is not None
    ends, width, size = _blocks(
        n, d, columns, by_blocks.WORKSPACE, _pairs(index), by_blocks.MOST_ROWS, chains, with_bias
    )
    if not ends:
        return None
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    grad_hidden = grad_weight = grad_bias = None
    hidden_out = weight_out = bias_out = 0
    rounded = how.rounded_hidden and len(ends) == 1 and (chains == 0 or columns <= chains)
    if needs.hidden:
        grad_hidden = torch.empty(n, d, dtype=hidden.dtype if rounded else torch.float32, device=device)
        hidden_out = grad_hidden.data_ptr()
    if main_grad is not None:
        weight_out = main_grad.data_ptr()
    elif needs.weight:
        grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        weight_out = grad_weight.data_ptr()
        if columns < grad_weight.shape[0]:
            grad_weight[columns:].zero_()
    if with_bias and bias is not None:
        grad_bias = torch.empty_like(bias)
        bias_out = grad_bias.data_ptr()
        if columns < grad_bias.shape[0]:
            grad_bias[columns:].zero_()
    per_row, scale = 0, 1.0
    if isinstance(inv_temperature, Tensor):
        per_row = inv_temperature.data_ptr()
    elif inv_temperature is not None:
        scale = inv_temperature
    logp, lse, entropy = (None if g is None else g.float() for g in upstream)
    call = _C.Sm90Backward(
        index,
        torch._C._cuda_getCurrentRawStream(index),
        element,
        n,
        d,
        hidden_at,
        row,
        weight_at,
        weight_row,
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else ELEMENTS[bias.dtype],
        problem.softcap or 0.0,
        per_row,
        scale,
        problem.softcap is None and inv_temperature is None and entropy is None,
        target_ids.data_ptr(),
        ignore_index,
        real_vocab_size,
        problem.vocab_start,
        ends,
        width,
        workspace.data_ptr(),
    )
    call.launch(
        saved.lse2_int.data_ptr(),
        saved.lse2_frac.data_ptr(),
        0 if entropy is None or saved.entropy is None else saved.entropy.data_ptr(),
        0 if logp is None else logp.data_ptr(),
        0 if logp is None else logp.stride(0),
        0 if lse is None else lse.data_ptr(),
        0 if lse is None else lse.stride(0),
        0 if entropy is None else entropy.data_ptr(),
        0 if entropy is None else entropy.stride(0),
        hidden_out,
        rounded,
        chains,
        weight_out,
        d,
        main_grad is not None,
        bias_out,
    )
    if grad_hidden is not None and how.hidden_ready is not None:
        how.hidden_ready(grad_hidden)
    call.finish()
    return grad_hidden, grad_weight, grad_bias
