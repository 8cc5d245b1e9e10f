// Which columns' clocks go off early, known before there are logits, as noise does not depend on them: a bit a column.
#pragma once

#include <cfloat>

#include "sm90/sampling_stream.cuh"

namespace vocabshard::sm90::sampling {

constexpr uint32_t kEarlyBelow = 1u << 26;  // words

// The words of a row's columns `begin`, a multiple of 32, to `end`.
template <int kThreads>
VS_DEVICE void make_noise(uint32_t* noise, const Row& row, int64_t seed, int32_t begin, int32_t end) {
#pragma unroll 1
  for (int32_t i = begin / 32 + static_cast<int32_t>(threadIdx.x); 32 * i < end; i += kThreads) {
    const int64_t group = row.columns.vocab_start / 4 + 8 * i;
    uint32_t early = 0;
#pragma unroll 2
    for (int32_t of_word = 0; of_word < 8; ++of_word) {
      const Philox words = column_words(group + of_word, 0, seed, row.key);
      early >>= 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) early |= words.word[j] < kEarlyBelow ? 1u << (28 + j) : 0;
    }
    noise[i] = early;
  }
}

// A row's, by one of `parts` CTAs.
template <int kThreads>
VS_DEVICE void make_noise_of_part(const SamplingRows& p, const Workspace& work, const Row& row, int32_t part,
                                  int32_t parts) {
  const int32_t words = (row.columns.valid + 31) / 32;
  if (p.draw)
    make_noise<kThreads>(work.noise + row.n * kNoiseWords, row, p.seed, 32 * (words * part / parts),
                         32 * (words * (part + 1) / parts));
}

// Columns without a bit come first only with a term of at least this much. is_early asks of a word from kEarlyBelow on
// that 1 + 2^-6 <= fma(term, bound, 1 + 2^-21), rounded: so term * bound >= 2^-6 - 2^-20.
VS_DEVICE float large_term(float bound) { return fmaxf(__fdividef(0x1.fep-7f, bound), FLT_MIN); }

}  // namespace vocabshard::sm90::sampling
