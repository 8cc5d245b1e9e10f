// When the clock of a column goes off, for kernels that draw.
#pragma once

#include "sm90/sampling_words.cuh"

namespace vocabshard::sm90::sampling {

struct Drawn {
  int64_t arrival;
  int64_t id;  // -1: none
  int32_t order;
};

VS_DEVICE uint32_t word_of(const Philox& words, int64_t i) {
  return i == 0 ? words.word[0] : i == 1 ? words.word[1] : i == 2 ? words.word[2] : words.word[3];
}

VS_DEVICE uint32_t column_word(int64_t id, uint32_t tag, int64_t seed, int64_t row) {
  return word_of(column_words(id >> 2, tag, seed, row), id & 3);
}

// E of a column. Rarely wanted: out of line.
static __device__ __noinline__ float clock_at(uint32_t x, int64_t id, int64_t seed, int64_t row) {
  return clock_of(x, x < kSecondBelow ? column_word(id, 1, seed, row) : 0);
}

VS_DEVICE bool in_range(float y_max) { return y_max > -kLogitLimit && y_max <= kLogitLimit; }

}  // namespace vocabshard::sm90::sampling
