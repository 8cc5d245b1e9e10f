"""Which tiles the Hopper forward computes, and on which cluster: schedule.h on the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "sm90/schedule.h"
using namespace vocabshard::sm90;

int fail(const char* what, int m, int g, int t, int c) {
  std::printf("%s: %d blocks of rows, %d groups, tiles of %d, %d clusters\n", what, m, g, t, c);
  return 1;
}

int check(int m_tiles, int groups, int tile_groups, int most) {
  const Schedule s = make_schedule(m_tiles, groups, tile_groups, most);
  if (s.clusters < 1 || s.clusters > most) return fail("clusters", m_tiles, groups, tile_groups, most);
  std::vector<int> seen(static_cast<size_t>(m_tiles) * groups);
  int fewest = 1 << 30, longest = 0, far = 0;
  for (int cluster = 0; cluster < s.clusters; ++cluster) {
    const int count = tile_count(s, cluster), first = first_unit(s, cluster);
    fewest = count < fewest ? count : fewest;
    longest = count > longest ? count : longest;
    for (int unit = 0; unit < s.units; ++unit) {
      const bool has = unit >= first && unit <= last_unit(s, cluster);
      if (has != (cluster >= first_cluster(s, unit) && cluster <= last_cluster(s, unit)))
        return fail("clusters of a unit", m_tiles, groups, tile_groups, most);
    }
    if (last_unit(s, cluster) - first + 1 > places(s)) return fail("places", m_tiles, groups, tile_groups, most);
    for (int rank = 0; rank < 2; ++rank) {
      Walk walk(s, cluster, rank);
      const Owned owned = owned_by(s, cluster, rank);
      bool ended = false;
      for (int i = 0; i < count; ++i) {
        const Tile t = walk.next();
        if (t.groups < 0 || t.groups > tile_groups) return fail("width", m_tiles, groups, tile_groups, most);
        // a consumer that has nothing to finish passes no turn on, so nothing may follow
        if (ended && t.groups > 0) return fail("a tile after an empty one", m_tiles, groups, tile_groups, most);
        ended = t.groups == 0;
        if (s.units == 1 && (t.group != tile_begin(s, owned, i) || t.group + t.groups != tile_begin(s, owned, i + 1)))
          return fail("where a tile begins", m_tiles, groups, tile_groups, most);
        if (t.groups == 0) continue;
        if (t.place < 0 || t.place >= places(s) || t.m != block_of_unit(s, first + t.place, rank))
          return fail("place", m_tiles, groups, tile_groups, most);
        for (int a = 0; a < t.groups; ++a) ++seen[static_cast<size_t>(t.m) * groups + t.group + a];
        // the pace is the same for all: far apart, a strip of weight would have left the cache
        const int steps = s.units == 1 ? 0 : static_cast<int>((long long)t.group * count / groups) - i;
        far = abs(steps) > far ? abs(steps) : far;
      }
    }
  }
  for (int tile = 0; s.units == 1 && tile < longest; ++tile) {
    int more = 0;
    for (int cluster = 0; cluster < s.clusters; ++cluster) more += tile_count(s, cluster) > tile + 1 ? 2 : 0;
    if (more != ctas_with_more(s, tile)) return fail("CTAs with more tiles", m_tiles, groups, tile_groups, most);
  }
  for (int n : seen)
    if (n != 1) return fail("a group is not computed once", m_tiles, groups, tile_groups, most);
  if (longest - fewest > 1) return fail("load", m_tiles, groups, tile_groups, most);
  if (far > 3) return fail("pace", m_tiles, groups, tile_groups, most);
  return 0;
}

int main() {
  const int sizes[] = {1, 2, 3, 4, 5, 7, 9, 64, 65, 127, 594, 786, 1024, 2004, 2374};
  for (int most : {1, 2, 7, 60, 66})
    for (int m_tiles = 1; m_tiles <= most && m_tiles <= 64; ++m_tiles)
      for (int groups : sizes)
        for (int tile_groups : {3, 4})
          if (check(m_tiles, groups, tile_groups, most)) return 1;
  return 0;
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_every_tile_once_evenly_and_in_step(tmp_path: Path) -> None:
    (tmp_path / "walk.cpp").write_text(PROGRAM)
    command = ["c++", "-std=c++17", "-O1", f"-I{CSRC}", "walk.cpp", "-o", "walk"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    done = subprocess.run([tmp_path / "walk"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
