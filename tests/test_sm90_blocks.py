"""How the Hopper backward cuts its work, with no GPU."""

from __future__ import annotations

import itertools

import pytest

from vocabshard.kernels.sm90_cut import cut

WORKSPACE = 256 << 20


@pytest.mark.parametrize("n", [1, 64, 4096, 8192, 32768, 65536, 65537, 10**6])
@pytest.mark.parametrize("d", [8, 2048, 16384])
@pytest.mark.parametrize("v", [1, 384, 50257, 151936])
def test_blocks_cover_all_and_fit(n: int, d: int, v: int) -> None:
    blocks = cut(n, d, v, WORKSPACE, 66)
    assert blocks.columns[0] == 0 and blocks.columns[-1] == v
    assert all(a < b and a % 384 == 0 for a, b in itertools.pairwise(blocks.columns))
    assert blocks.rows <= n and (blocks.rows == n or blocks.rows % 128 == 0)
    widest = max(b - a for a, b in itertools.pairwise(blocks.columns))
    chain = 4 * d * widest if blocks.rows < n else 0
    assert 2 * blocks.rows * widest + chain <= WORKSPACE or widest <= 384


@pytest.mark.parametrize("n", [1, 4096, 16384, 40000])
@pytest.mark.parametrize("d, v", [(64, 50257), (8192, 151936), (4096, 3000)])
def test_blocks_of_whole_chains(n: int, d: int, v: int) -> None:
    blocks = cut(n, d, v, WORKSPACE - 48 * n, 66, 16384, step=3840)
    assert all(start % 3840 == 0 for start in blocks.columns[:-1]) and blocks.columns[-1] == v
    widest = max(b - a for a, b in itertools.pairwise(blocks.columns))
    assert 2 * blocks.rows * widest + (4 * d * widest if blocks.rows < n else 0) <= WORKSPACE


def test_rounds_are_full_where_they_can_be() -> None:
    assert cut(4096, 4096, 151936, WORKSPACE, 66).columns[:3] == (0, 66 * 384, 2 * 66 * 384)
    widths = [b - a for a, b in itertools.pairwise(cut(4096, 2048, 131072, WORKSPACE, 66).columns)]
    assert set(widths[:-1]) == {66 * 384} and widths[-1] > widths[0]  # no thin block at the end
