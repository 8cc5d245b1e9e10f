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

// Of a CTA whose consumers have 64 rows.
struct DrawState {
  Winner earliest[2][128];  // [row group][lane of a consumer]
  int64_t keys[64];         // of the rows
};

VS_DEVICE float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2 of ln 2 E / e^y, or up to a quarter more: arrivals are logarithms whose fraction is taken for linear, 0.0861 off
// at most, and 0.0625 is what fp32 loses of the largest ones. Nobody has 2^40.
VS_DEVICE float limit_of(int64_t arrival) {
  constexpr float kShare = -0.52876637f, kSpare = 0.25f;
  return fma(static_cast<float>(arrival), 0x1p-23f, -127.0f + kShare + kSpare);
}

VS_DEVICE float quad_min(float x) {
  x = fminf(x, __shfl_xor_sync(~0u, x, 1));
  return fminf(x, __shfl_xor_sync(~0u, x, 2));
}

// One lane's 16 columns of a row in a group of 64.
struct Race {
  float scale;
  int64_t seed, key;
  int64_t first_id;  // of the 16, a multiple of 4
  int32_t first;     // the same as a column of this shard
  int32_t left;      // of the 16 that are real, or more
};

// A first limit from approximations that are never too small: E <= -log2(1 - (x + 1) / 2^32), rounded up.
VS_DEVICE float first_limit(const float (&z)[16], const uint32_t (&x)[16], const Race& race) {
  float least = 0x1p40f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float rest = add(0x1.fffffep+0f, -from_bits(x[j] >> 9 | 0x3f800000u));  // 1 - t, down to 0
    const float clock = add(-log2_of(rest), 0x1p-20f);
    const float y = j < race.left ? mul(z[j], race.scale) : neg_inf();
    const float at = fma(y, -kLog2e, log2_of(clock));
    least = fminf(least, at);  // not of a NaN, whose row comes to nothing
  }
  return add(least, -0.52876637f + 0.25f);
}

VS_DEVICE void run_race(const float (&z)[16], const Race& race, float& limit, Winner& earliest) {
  uint32_t x[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Philox words = column_words((race.first_id >> 2) + i, 0, race.seed, race.key);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[4 * i + e] = words.word[e];
  }
  if (__any_sync(~0u, limit >= 0x1p39f)) limit = fminf(limit, first_limit(z, x, race));
  limit = quad_min(limit);
  uint32_t early = 0;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float most = ptx::exp2(fma(fmaxf(mul(z[j], race.scale), -kLogitLimit), kLog2e, limit));
    // 1 + x / 2^32, rounded down to 23 bits
    if (from_bits(x[j] >> 9 | 0x3f800000u) <= add(most, 1.0000005f)) early |= 1u << j;
  }
  early &= race.left >= 16 ? 0xffffu : (1u << race.left) - 1;
#pragma unroll 1
  while (early != 0) {
    const int j = __ffs(static_cast<int>(early)) - 1;
    early &= early - 1;
    float logit = z[0];
    uint32_t word = x[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) {
      logit = i == j ? z[i] : logit;
      word = i == j ? x[i] : word;
    }
    if (is_neg_inf(logit)) continue;
    uint32_t second = 0;
    if (word < kSecondBelow) {
      const Philox words = column_words((race.first_id + j) >> 2, 1, race.seed, race.key);
      const int e = j % 4;
      second = e == 0 ? words.word[0] : e == 1 ? words.word[1] : e == 2 ? words.word[2] : words.word[3];
    }
    const float y = mul(logit, race.scale);
    earliest = earlier(earliest, winner_of(arrival_of(clock_of(word, second), y), race.first + j, y));
    limit = fminf(limit, limit_of(earliest.arrival));
  }
}

// Before temperature, in a loop that turns the accumulators round: its code is long. `valid`: columns from the tile's
// first on that are real.
template <int kGroups>
VS_DEVICE void draw_tile(Accumulator<1, kGroups>& acc, const RowWork& work, int64_t seed, DrawState& state,
                         int32_t first_row, int32_t first_column, int32_t groups, int32_t valid, int warp, int lane) {
  constexpr int kAll = 32 * kGroups, kStep = 32;
#pragma unroll 1
  for (int a = 0; a < kGroups; ++a) {
    if (a < groups) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (first_row + row_of(r, warp, 0) >= work.rows) continue;  // the whole warp
        const int32_t row = row_of(r, warp, lane), column = kGroupColumns * a + 16 * (lane % 4);
        Race race = {work.inv_temperature,  seed,
                     state.keys[row],       work.vocab_start + first_column + column,
                     first_column + column, max(valid - column, 0)};
        if (work.row_inv_temperature != nullptr)
          race.scale = work.row_inv_temperature[min(first_row + row, work.rows - 1)];
        Winner& kept = state.earliest[r][32 * warp + lane];
        Winner earliest = kept;
        float z[16], limit = quad_min(limit_of(earliest.arrival));
#pragma unroll
        for (int j = 0; j < 16; ++j) z[j] = acc.at(r, 0, j);
        run_race(z, race, limit, earliest);
        kept = earliest;
      }
    }
    float head[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) head[i] = acc.d[0][i];
#pragma unroll
    for (int i = 0; i < kAll - kStep; ++i) acc.d[0][i] = acc.d[0][i + kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) acc.d[0][kAll - kStep + i] = head[i];
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
  state.keys[thread] = row_keys == nullptr ? row : row_keys[min(row, work.rows - 1)];
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
