"""Into which blocks of rows and columns the Hopper backward cuts its work. No choice changes a byte."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

MOST_ROWS = 65536  # more are taken in blocks, and a block of grad_weight is summed over them in fp32
COLUMNS, ROWS = 384, 128  # of the tiles that a pair of multiprocessors takes at a time
_AGAIN = 500  # columns whose product costs as much as reading and writing grad_hidden


class Blocks(NamedTuple):
    """Rows at a time, and where blocks of columns begin."""

    rows: int
    columns: tuple[int, ...]  # the end comes last


@functools.lru_cache(maxsize=64)
def cut(
    n: int,
    d: int,
    columns: int,
    workspace: int,
    pairs: int,
    most_rows: int = MOST_ROWS,
    copied: bool = False,
    step: int = COLUMNS,
) -> Blocks:
    """Blocks whose dlogits, and what goes with them, fit `workspace` bytes; copied: the weights are, too. They begin at
    multiples of `step` columns, which is one of COLUMNS.

    Tiles of dlogits and of grad_weight run on `pairs` of multiprocessors in rounds, the last of which may be nearly
    empty: blocks are cut so that the rounds are few. Each block also reads and writes grad_hidden once more.
    """
    pieces = -(-n // most_rows)
    rows = min(-(-n // pieces // ROWS) * ROWS, n)
    # dlogits in 16 bits; a sum over each tile's rows for grad_bias; grad_weight in fp32 where rows come in blocks; the
    # weights where they are copied
    per_column = 2 * rows + 4 * -(-n // ROWS) + (4 * d if pieces > 1 else 0) + (2 * (d + 8) if copied else 0)
    tiles = -(-columns // COLUMNS)
    step = min(step // COLUMNS, tiles)
    most = min(max(workspace // (per_column * COLUMNS) // step, 1) * step, tiles)
    row_tiles, depth_tiles = -(-rows // ROWS), -(-d // ROWS)
    again = _AGAIN * rows * d / (pairs * ROWS * COLUMNS)

    def widths(width: int) -> list[int]:
        count, rest = divmod(tiles, width)
        if rest and count and width + rest <= most:  # the last block takes what is left
            return [width] * (count - 1) + [width + rest]
        return [width] * count + ([rest] if rest else [])

    def cost(width: int) -> float:
        return sum(-(-w * row_tiles // pairs) * d + -(-w * depth_tiles // pairs) * rows + again for w in widths(width))

    best = widths(min(range(most - most % step, 0, -step), key=cost))
    starts = itertools.accumulate((w * COLUMNS for w in best), initial=0)
    return Blocks(rows, tuple(min(start, columns) for start in starts))
