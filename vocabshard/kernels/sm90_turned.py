"""Gradients where the forward kept everything: columns at a time, codes of the next ones turned beside the product.

A pass that turns codes into dlogits where they lie takes as long as memory needs for its bytes; grad_weight's product
leaves memory and two of its warps idle. So they turn most of the next block's rows while that product goes through one
block. grad_hidden is one product over all columns, before the last of grad_weight's. No byte depends on any of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import Tensor

from vocabshard.kernels.problem import KeptLogits
from vocabshard.kernels.sm90_products import grad_weight as add_grad_weight
from vocabshard.kernels.sm90_terms import RowTerms

BLOCKS = 6
ROWS_FROM, ELEMENTS_FROM = 4096, 1 << 24  # N, and N D
TILE = 192  # columns of a tile of grad_weight's
KEEPS_UP = 5400  # D at which idle warps turn a block as fast as grad_weight goes through one as large
_STEP = 128  # rows


def ends_of_blocks(columns: int, pairs: int) -> list[int]:
    """About BLOCKS of them, in whole rounds of tiles on `pairs` of multiprocessors where D is a multiple of 512."""
    unit = max(pairs // 2, 1) * TILE
    width = -(-columns // BLOCKS // unit) * unit
    ends = list(range(width, columns, width))
    if ends and columns - ends[-1] < width // 2:
        ends.pop()
    return [*ends, columns]


def pays(n: int, d: int, columns: int, pairs: int) -> bool:
    """Whether the product takes long enough, and there are columns for several blocks."""
    return n >= ROWS_FROM and n * d >= ELEMENTS_FROM and len(ends_of_blocks(columns, pairs)) > 1


def turned_rows(n: int, d: int) -> int:
    """Leading rows that idle warps turn; a pass of its own takes the others."""
    rows = min(int(n * d / KEEPS_UP) // _STEP * _STEP, n)
    return n if n - rows < 4 * _STEP else rows


def grad_weight_in_blocks(
    terms: RowTerms,
    kept: KeptLogits,
    grad_weight: Tensor,
    columns: int,
    pairs: int,
    add: bool,
    complete: Callable[[Tensor], None],
) -> None:
    """`complete` is called once, with all of dlogits [N, columns] there, before the last block's product."""
    n, d = terms.hidden.shape
    dlogits = kept.tensors[0].view(terms.hidden.dtype)
    ends = ends_of_blocks(columns, pairs)
    rows, turned = slice(0, n), slice(0, turned_rows(n, d))
    terms.of_kept(kept, rows, 0, ends[0], dlogits, None)
    for i, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
        turn = None
        if stop == columns:
            complete(dlogits[:, :columns])
        elif turned.stop > 0:
            turn = terms.kept_call(kept, turned, stop, ends[i + 1], dlogits[:, stop:], None)
        add_grad_weight(
            dlogits[:, start:stop], terms.hidden, grad_weight[start:stop], add=add, row_mask=terms.broken, turn=turn
        )
        if stop < columns and turned.stop < n:
            rest = slice(turned.stop, n)
            terms.of_kept(kept, rest, stop, ends[i + 1], dlogits[rest, stop:], None)
