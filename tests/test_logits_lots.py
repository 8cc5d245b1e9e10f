"""How rows of logits are dealt in lots: logits_lots.h on the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"

PROGRAM = r"""
#include <cstdio>
#include "sm90/logits_lots.h"
using namespace vocabshard::sm90::logits;

int fail(const char* what, uint32_t outputs, uint32_t steps, uint32_t workers, uint32_t lot) {
  std::printf("%s: %u rows of %u steps, %u workers, lot %u\n", what, outputs, steps, workers, lot);
  return 1;
}

int check(uint32_t outputs, uint32_t steps, uint32_t workers, uint32_t most) {
  const Lots lots = deal_lots(outputs, steps, workers, most);
  uint64_t row = 0, at = 0;
  for (uint32_t i = 0; i < lots.count; ++i) {
    const Lot lot = lots.at(i, steps);
    if (lot.row != row || lot.first != at) return fail("not where the last one ended", outputs, steps, workers, i);
    if (lot.steps == 0 || lot.rows == 0) return fail("empty", outputs, steps, workers, i);
    if (lot.rows > 1 && lot.steps != steps) return fail("parts of several rows", outputs, steps, workers, i);
    for (uint64_t r = lot.row; r < static_cast<uint64_t>(lot.row) + lot.rows; ++r) {
      uint32_t parts;
      const uint32_t first = lots.of_row(static_cast<uint32_t>(r), &parts);
      if ((parts == 1) != (lot.steps == steps)) return fail("whole or not", outputs, steps, workers, i);
      if (parts > 1 && (i < first || i >= first + parts || first < lots.split || i - lots.split >= most))
        return fail("place of a part", outputs, steps, workers, i);
    }
    at += lot.steps;
    if (at == steps) {
      row += lot.rows;
      at = 0;
    }
  }
  if (row != outputs || at != 0) return fail("rows are left", outputs, steps, workers, lots.count);
  // all end together: the last lot is small beside a worker's part of the work
  const uint64_t part = static_cast<uint64_t>(outputs) * steps / workers;
  const Lot last = lots.at(lots.count - 1, steps);
  if (workers >= 1000 && part >= 1000 && steps >= 8 && static_cast<uint64_t>(last.rows) * last.steps * 8 > part)
    return fail("the last lot is long", outputs, steps, workers, lots.count - 1);
  return 0;
}

int main() {
  for (uint32_t workers : {1u, 7u, 108u * 24, 132u * 20, 132u * 24})
    for (uint32_t steps : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u, 32u, 63u, 64u, 126u, 149u, 1024u, 4001u})
      for (uint32_t outputs : {1u, 2u, 3u, 16u, 55u, 100u, 257u, 1000u, 3168u, 3200u, 4096u, 8192u, 32768u, 65537u})
        if (check(outputs, steps, workers, 4 * workers)) return 1;
  std::puts("ok");
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_lots(tmp_path: Path) -> None:
    source, program = tmp_path / "lots.cpp", tmp_path / "lots"
    source.write_text(PROGRAM)
    subprocess.run(["c++", "-std=c++17", "-O1", f"-I{CSRC}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
