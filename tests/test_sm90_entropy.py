"""The entropy value of a tile in integers: entropy_sum.h on the host, against contract.h's fp64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"

PROGRAM = r"""
#include <cmath>
#include <cstdio>
#include <random>
#include "sm90/entropy_sum.h"
using namespace vocabshard;
using namespace vocabshard::sm90;

double number(const EntropyValue& v) { return std::ldexp(static_cast<double>(v.m), v.e) * (v.negative ? -1 : 1); }

int main() {
  std::mt19937_64 g(1);
  std::uniform_real_distribution<double> uniform(0, 1);
  long bad = 0, rounded = 0;
  for (long i = 0; i < 3000000; ++i) {
    int32_t K = static_cast<int32_t>(g() % (1ull << g() % 22));
    K = (K > 1512775 ? 1512775 : K) * (g() & 1 ? 1 : -1);
    const float s = static_cast<float>(std::ldexp(0.7 + 22 * uniform(g), 96));  // a tile's terms, the largest near 1
    const int below = g() % 4 == 0 ? g() % 60 : g() % 8;
    float d = static_cast<float>(std::ldexp(2.8 * uniform(g), -below) * s * (g() & 1 ? 1 : -1));
    switch (g() % 50) {
      case 0: d = 0.0f; break;
      case 1: d = -0.0f; break;
      case 2: d = -s * static_cast<float>(K % 3); break;  // nothing, or little, is left
    }
    const EntropyValue fast = entropy_value(K, s, d);
    rounded += std::fma(static_cast<double>(K), static_cast<double>(s), static_cast<double>(d)) !=
               static_cast<long double>(K) * s + d;
    if (number(fast) != number(entropy_value_fp64(K, s, d)) || (fast.m >> 53) != 0)
      if (bad++ < 10) std::printf("K = %d, s = %a, d = %a: %a\n", K, s, d, number(fast));
  }
  if (rounded < 1000) return std::printf("only %ld of the sums had to be rounded\n", rounded), 1;
  return bad != 0;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH")
def test_entropy_of_a_tile_has_the_bits_of_fp64(tmp_path: Path) -> None:
    (tmp_path / "entropy.cpp").write_text(PROGRAM)
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", f"-I{CSRC}"]
    subprocess.run([*command, "entropy.cpp", "-o", "entropy"], check=True, timeout=120, cwd=tmp_path)
    done = subprocess.run([tmp_path / "entropy"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
