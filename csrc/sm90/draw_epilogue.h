// The race of a tile's columns, in the forward's epilogue: each lane holds its columns' logits, draws their noise, and
// keeps the earliest of each of its rows in shared memory from tile to tile.
//
// Noise is made for every column, its logarithm taken for few: E >= log2(e) x / 2^32, so that a column comes first only
// where x / 2^32 <= ln 2 E' e^(y - y'), E' and y' those of the earliest so far. That is compared by approximation, with
// something to spare, and who comes through is looked at by the contract's operations.
#pragma once

#include "sm90/draw.h"
#include "sm90/epilogue.h"
#include "sm90/params.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

// A column that may come first, to be looked at when another one turns up, or the tile ends.
struct alignas(8) Candidate {
  float z;
  uint32_t word;
};

// A lane's part of a row.
struct alignas(8) Race {
  float limit;        // log2 of what the earliest so far leaves room for
  int32_t candidate;  // as a column of this shard; -1: none
};

// Of a CTA whose consumers have 64 rows.
struct DrawState {
  Winner earliest[2][128];  // [row group][lane of a consumer]
  Candidate candidate[2][128];
  Race race[2][128];
  int64_t keys[64];  // of the rows
  float scales[64];
};

VS_DEVICE float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kShare = -0.52876637f;  // log2 of ln 2
// In logarithms to base 2: arrivals are some whose fraction is taken for linear, 0.0861 off at most; of the largest
// ones fp32 loses 0.0625, and 0.18 of a product with a rounded scale.
constexpr float kSpare = 0.36f;

// log2 of ln 2 E / e^y, and something to spare. Nobody has 2^40.
VS_DEVICE float limit_of(int64_t arrival) {
  return fma(static_cast<float>(arrival), 0x1p-23f, -127.0f + kShare + kSpare);
}

// The same by approximations that are never too small: E <= -log2(1 - (x + 1) / 2^32), rounded up.
VS_DEVICE float limit_of(uint32_t x, float y) {
  const float rest = add(0x1.fffffep+0f, -from_bits(x >> 9 | 0x3f800000u));  // 1 - t, down to 0
  return fma(y, -kLog2e, add(log2_of(add(-log2_of(rest), 0x1p-20f)), kShare + kSpare));
}

VS_DEVICE float quad_min(float x) {
  x = fminf(x, __shfl_xor_sync(~0u, x, 1));
  return fminf(x, __shfl_xor_sync(~0u, x, 2));
}

VS_DEVICE uint32_t word_at(const Philox& words, int i) {
  return i == 0 ? words.word[0] : i == 1 ? words.word[1] : i == 2 ? words.word[2] : words.word[3];
}

VS_DEVICE void judge(Race& race, const Candidate& c, float scale, int64_t vocab_start, int64_t seed, int64_t key,
                     Winner& earliest) {
  uint32_t second = 0;
  if (c.word < kSecondBelow)
    second = word_at(column_words((vocab_start + race.candidate) >> 2, 1, seed, key), race.candidate % 4);
  const float y = mul(c.z, scale);
  const Winner first = earlier(earliest, winner_of(arrival_of(clock_of(c.word, second), y), race.candidate, y));
  earliest = first;
  race.limit = fminf(race.limit, limit_of(first.arrival));
}

// A lane's 16 columns of a row in the tile's group `a`, from `column` of the shard on, of which `left` or more are
// real.
template <int kGroups>
VS_DEVICE void run_race(Accumulator<1, kGroups>& acc, int r, int a, Race& race, float scale, int32_t column,
                        int32_t left, int64_t vocab_start, int64_t seed, int64_t key, Candidate& candidate,
                        Winner& earliest) {
  uint32_t x[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Philox words = column_words(((vocab_start + column) >> 2) + i, 0, seed, key);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[4 * i + e] = words.word[e];
  }
  float z[16];
#pragma unroll
  for (int b = 0; b < kGroups; ++b)
    if (a == b) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        z[j] = acc.at(r, b, j);
        asm volatile("" : "+f"(z[j]));  // a branch, not a selection among all
      }
    }
  if (__any_sync(~0u, race.limit >= 0x1p39f)) {
#pragma unroll
    for (int j = 0; j < 16; ++j)  // not by a NaN, whose row comes to nothing
      if (j < left) race.limit = fminf(race.limit, limit_of(x[j], mul(z[j], scale)));
  }
  race.limit = quad_min(race.limit);
  // where the earliest is about -2^20, the smallest that counts, everybody is looked at
  const float limit = race.limit > 1.512e6f ? from_bits(0x7f800000u) : race.limit, slope = mul(scale, kLog2e);
  uint32_t early = 0;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float most = ptx::exp2(fma(z[j], slope, limit));
    // 1 + x / 2^32, rounded down to 23 bits
    if (from_bits(x[j] >> 9 | 0x3f800000u) <= add(most, 1.0000005f)) early |= 1u << j;
  }
  early &= left >= 16 ? 0xffffu : (1u << left) - 1;
#pragma unroll 1
  while (early != 0) {
    const int j = __ffs(static_cast<int>(early)) - 1;
    early &= early - 1;
    Candidate next = {z[0], x[0]};
#pragma unroll
    for (int i = 1; i < 16; ++i) {
      next.z = i == j ? z[i] : next.z;
      next.word = i == j ? x[i] : next.word;
    }
    if (is_neg_inf(next.z)) continue;
    if (race.candidate >= 0) judge(race, candidate, scale, vocab_start, seed, key, earliest);
    candidate = next;
    race.candidate = column + j;
    race.limit = fminf(race.limit, limit_of(next.word, mul(next.z, scale)));
  }
}

// Before temperature, group by group in a loop: its code is long. `valid`: columns from the tile's first on that are
// real.
template <int kGroups>
VS_DEVICE void draw_tile(Accumulator<1, kGroups>& acc, const RowWork& work, int64_t seed, DrawState& state,
                         int32_t first_row, int32_t first_column, int32_t groups, int32_t valid) {
#pragma unroll 1
  for (int a = 0; a < groups; ++a) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int thread = ptx::thread(), warp = thread / 32 % 4, lane = thread % 32;
      const int32_t column = kGroupColumns * a + 16 * (lane % 4), left = max(valid - column, 0);
      const int32_t row = row_of(r, warp, lane);
      if (first_row + row_of(r, warp, 0) >= work.rows) continue;  // the whole warp
      const int mine = 32 * warp + lane;
      Race race = state.race[r][mine];
      if (a == 0) race = {limit_of(state.earliest[r][mine].arrival), -1};
      run_race(acc, r, a, race, state.scales[row], first_column + column, left, work.vocab_start, seed, state.keys[row],
               state.candidate[r][mine], state.earliest[r][mine]);
      state.race[r][mine] = race;
    }
  }
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
    const int thread = ptx::thread(), warp = thread / 32 % 4, lane = thread % 32;
    const int32_t row = row_of(r, warp, lane);
    const int mine = 32 * warp + lane;
    Race last = state.race[r][mine];
    if (first_row + row < work.rows && last.candidate >= 0)
      judge(last, state.candidate[r][mine], state.scales[row], work.vocab_start, seed, state.keys[row],
            state.earliest[r][mine]);
  }
}

// By the threads of a consumer, before its first tile.
VS_DEVICE void start_draw(const RowWork& work, const int64_t* row_keys, DrawState& state, int32_t first_row,
                          int thread) {
#pragma unroll
  for (int r = 0; r < 2; ++r)  // who is none of the rows has won already
    state.earliest[r][thread] = first_row + row_of(r, thread / 32, thread % 32) < work.rows ? nobody() : Winner{0, 0};
  if (thread >= 64) return;
  const int32_t row = first_row + thread;
  const int32_t last = min(row, work.rows - 1);
  state.keys[thread] = row_keys == nullptr ? row : row_keys[last];
  state.scales[thread] = work.row_inv_temperature == nullptr ? work.inv_temperature : work.row_inv_temperature[last];
}

// What the CTA has of each of its 64 rows.
VS_DEVICE void store_draw(const DrawState& state, int64_t* winners, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Winner first = earlier_by_shuffle(earlier_by_shuffle(state.earliest[r][32 * warp + lane], 1), 2);
    if (lane % 4 == 0) winner_store(winners + row_of(r, warp, lane), 64, first);
  }
}

}  // namespace vocabshard::sm90
