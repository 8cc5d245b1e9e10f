// Exponentials of bf16 logits by table, in shared memory: the same bits as the polynomial's for a quarter of the
// instructions, but every look-up is a random bank. Half of a tile is looked up and half computed, so that neither
// pipe is full.
//
// An entry is e^(x * scale) for the pattern x, with R = 0. Patterns are addresses as they are (positive ones below
// 0x8000, negative ones above), from 2^-26 in size, below which e^y is 1, up to kLimit.
#pragma once

#include "sm90/logits_element.cuh"

namespace vocabshard::sm90::logits {

struct Table {
  static constexpr float kLimit = 63.0f;            // logits of a plain tile are smaller, before and after scaling
  static constexpr float kLeastScale = 1.0f / 256;  // so that limits are of normal size
  static constexpr float kMostScale = 1.99f;        // e^(2^-26 * scale) still is 1
  static constexpr uint32_t kFirst = 0x3280, kEnd = 0x4280, kNegative = 0x8000;  // 2^-26, 64, the sign
  static constexpr uint32_t kBytes = 4 * (kNegative + kEnd - kFirst);

  // Shared memory, from the entry of kFirst on. By all threads of the block, which synchronise afterwards.
  VS_DEVICE static void fill(float* table, float scale) {
    for (uint32_t i = 2 * threadIdx.x; i < 2 * (kEnd - kFirst); i += 2 * blockDim.x) {
      const uint32_t at = i < kEnd - kFirst ? i : kNegative + i - (kEnd - kFirst);
      *reinterpret_cast<float2*>(table + at) = {entry(kFirst + at, scale), entry(kFirst + at + 1, scale)};
    }
  }

  // The sum of the exponentials of two logits; base: the shared address of what pattern 0 would have.
  VS_DEVICE static float pair(uint32_t w, uint32_t base) {
    // from either side to at least 2^-26: as signed integers negative patterns grow with their size, too
    const uint32_t x = __vmaxu2(__vmaxs2(w, 0xb280b280u), 0x32803280u);
    return add(load_shared(place_of_low(x, base)), load_shared(place_of_high(x, base)));
  }

  // Of eight.
  VS_DEVICE static float sum(const uint32_t* w, uint32_t base) {
    float pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = Table::pair(w[i], base);
    return add(add(pair[0], pair[1]), add(pair[2], pair[3]));
  }

 private:
  VS_DEVICE static float entry(uint32_t pattern, float scale) {
    const Exp e = exp_split(mul(BF16::value(pattern), scale));
    return scale_pow2(e.p, e.k);
  }
};

}  // namespace vocabshard::sm90::logits
