"""What the Hopper forward keeps of logits for the backward: 16 bits each (csrc/sm90/kept_code.h), of bf16 operands.

A row has a code for each real column, in groups of 64, a reference of fp32 for each group, and its target's y. The
codes' error is small beside the rounding to bf16 that the gradient of the logits undergoes in any case, so nothing is
kept where that rounding is finer. The backward may turn codes into the gradient in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard.kernels.problem import KeptLogits, LocalProblem
from vocabshard.kernels.sm90_inputs import plain_strides, readable_by_tma

GROUP = 64
# kept rows are a multiple of this, or all: blocks of rows whose sums go to grad_bias then begin where they end
KEPT_ROWS = 128


def groups_of(columns: int) -> int:
    """Groups of columns that share a reference."""
    return -(-columns // GROUP)


def kept_bytes_per_row(columns: int, dtype: torch.dtype) -> int:
    """Codes, references and the target's y; 0 for operands of which nothing is kept."""
    return groups_of(columns) * (2 * GROUP + 4) + 4 if dtype == torch.bfloat16 else 0


def why_not_kept(hidden: Tensor, weight: Tensor, problem: LocalProblem) -> str:
    """Why these operands' logits cannot be kept, or an empty text."""
    if problem.valid == 0:
        return "this shard is padding alone: there are no logits to keep"
    if weight.dtype != torch.bfloat16:
        return f"the sm90 kernels keep logits of bf16 operands in 16 bits, which is too few for {weight.dtype}"
    if problem.softcap is not None:
        return "the sm90 kernels keep no logits under a soft-cap: its slope needs more than 16 bits"
    if not readable_by_tma(plain_strides(weight)):
        return "the sm90 kernels keep logits where the weight's rows lie on 16 bytes, and these do not"
    return ""


def new_kept(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> KeptLogits:
    """Room for `rows` rows: codes int16 [rows, columns], references fp32 [rows, groups], y of the targets [rows]."""
    groups = groups_of(columns)
    codes = torch.empty(rows, groups * GROUP, dtype=torch.int16, device=device)
    references = torch.empty(groups, rows, dtype=torch.float32, device=device).t()
    return KeptLogits((codes, references, torch.empty(rows, dtype=torch.float32, device=device)))
