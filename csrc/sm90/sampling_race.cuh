// The token and the truncated sum of a row's columns under a cut that is known.
#pragma once

#include <cfloat>

#include "sm90/sampling_stream.cuh"

namespace vocabshard::sm90::sampling {

// Terms of a row whose largest y this is: see logits_share.cuh.
struct Terms {
  float magic, lowest, lowest_kept, scale;

  VS_DEVICE Terms(float y_max, float scale) : scale(scale) {
    const int32_t R = 32 * limb_top(exp_k(clamp_logit(y_max))) - logits::kOffset;
    magic = static_cast<float>(12582912 - R);
    lowest = mul(static_cast<float>(R + logits::kLowest), logits::kLn2f);
    lowest_kept = fmaxf(lowest, -kLogitLimit);  // finite logits below -2^20 count as -2^20
  }
  // A kept z is finite.
  VS_DEVICE float operator()(float z, bool kept) const {
    return logits::scaled_exp(kept ? fmaxf(mul(z, scale), lowest_kept) : lowest, magic);
  }
};

// The sum of exponentials in units of e^y_max.
VS_DEVICE float total_of(const Partial& p) {
  const int32_t k_max = exp_k(clamp_logit(p.y_max)), n = 32 * (limb_top(k_max) - 1) - k_max;
  const double unit = from_bits(static_cast<uint64_t>(1023 + n) << 52);
  return static_cast<float>(mul(counters_value(p.c), unit)) / exp_split(clamp_logit(p.y_max)).p;
}

struct Race {
  Words<2> first;  // arrival, who
  logits::Counters sum;

  VS_DEVICE Race() : first({{kNoArrival, kNobody}}) { sum.clear(); }
};

// Of equals of a cut the columns up to this one are kept; the row's number of columns: all of them.
VS_DEVICE int32_t last_equal(int64_t cut, const Columns& columns) {
  return static_cast<int32_t>(
      min(max(cut_tie(cut) - columns.vocab_start, int64_t{-1}), static_cast<int64_t>(columns.valid)));
}

// Equals of the cut past the `last` of a piece.
VS_DEVICE void leave_out(float4& v, float cut_z, int32_t last) {
  v.x = v.x == cut_z && 0 > last ? neg_inf() : v.x;
  v.y = v.y == cut_z && 1 > last ? neg_inf() : v.y;
  v.z = v.z == cut_z && 2 > last ? neg_inf() : v.z;
  v.w = v.w == cut_z && 3 > last ? neg_inf() : v.w;
}

struct Look {
  int64_t arrival;
  float clock;
};

// Rarely wanted: out of line.
static __device__ __noinline__ Look look_at(float y, int64_t id, int64_t seed, int64_t row_key) {
  const float clock = clock_at(column_word(id, 0, seed, row_key), id, seed, row_key);
  return {arrival_of(clock, y), clock};
}

// Whether a column of this term may come first. E >= log2(e) x / 2^32, so that it does only where x / 2^32 is at most
// ln 2 E' e^(y - y'), E' and y' those of the earliest so far: compared by approximation with a quarter to spare.
VS_DEVICE bool is_early(uint32_t word, float term, float bound) {
  // 1 + x / 2^32, rounded down to 23 bits
  return from_bits(word >> 9 | 0x3f800000u) <= fma(term, bound, 1.0000005f);
}

constexpr float kPassShare = 0.8713f;  // of ln 2, with a quarter to spare

// The bound that a column gives.
VS_DEVICE float bound_of(float clock, float term) { return fmaxf(__fdividef(mul(clock, kPassShare), term), 1e-37f); }

// Bit i: the i-th of four columns from `id` on may come first.
VS_DEVICE uint32_t early_of_four(const float (&terms)[4], int64_t id, int64_t seed, int64_t row_key, float bound) {
  const Philox words = column_words(id >> 2, 0, seed, row_key);
  uint32_t early = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) early |= is_early(words.word[i], terms[i], bound) ? 1u << i : 0;
  return early;
}

// Bit 4 i + j of `early`: column base + stride i + j is looked at, if races(z, column).
template <class Races>
VS_DEVICE void look_at_early(const Columns& columns, const Terms& term, int32_t base, int32_t stride, uint32_t early,
                             int64_t seed, int64_t row_key, const Races& races, float& bound, Words<2>& first) {
#pragma unroll 1
  for (; early != 0; early &= early - 1) {
    const int32_t bit = __ffs(static_cast<int>(early)) - 1, column = base + stride * (bit / 4) + bit % 4;
    if (column >= columns.valid) continue;
    const float z = columns.row[column];
    if (!races(z, column)) continue;
    const int64_t id = columns.vocab_start + column;
    const Look look = look_at(clamp_logit(mul(z, term.scale)), id, seed, row_key);
    first = Smaller()(first, Words<2>{{look.arrival, who_is(id, z)}});
    bound = fminf(bound, bound_of(look.clock, term(z, true)));
  }
}

// Sums of four columns each, of tiles of four lanes each: a whole tile for every lane, its lane % 4 th.
VS_DEVICE float tile_of_lane(const float (&s)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  float a = odd ? s[1] : s[0], b = odd ? s[3] : s[2];
  a = add(a, __shfl_xor_sync(kAllLanes, odd ? s[0] : s[1], 1));
  b = add(b, __shfl_xor_sync(kAllLanes, odd ? s[2] : s[3], 1));
  return add(upper ? b : a, __shfl_xor_sync(kAllLanes, upper ? a : b, 2));
}

// A tile of 16 columns, which a thread reads at once.
struct TileOfColumns {
  int32_t first;
  float4 v[kTile / 4];

  VS_DEVICE TileOfColumns(const Columns& columns, int32_t column) : first(column / kTile * kTile) {
    if (first + kTile <= columns.valid) {  // not one after the other
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) v[i] = *reinterpret_cast<const float4*>(columns.row + first + 4 * i);
    } else {
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) v[i] = columns.four(first + 4 * i);
    }
  }
  // The sum of its kept columns. `cut_z`, `last`: the cut, z finite and column.
  VS_DEVICE double sum(const Terms& term, float cut_z, int32_t last, int32_t valid) {
    float e[kTile];
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) {
      if (last < valid) leave_out(v[i], cut_z, last - (first + 4 * i));
      const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) e[4 * i + j] = term(z[j], z[j] >= cut_z);
    }
    return static_cast<double>(tree16(e));
  }
};

VS_DEVICE int32_t column_at(const Columns& columns, int64_t place) {
  return static_cast<int32_t>(kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place)) - columns.vocab_start);
}

// The sum of the kept columns of a tile, if none of it before `column` has(z, column). `cut_z`, `tie`: the cut, z
// finite and column.
template <class Has>
VS_DEVICE void add_tile_of(TileOfColumns& tile, int32_t column, int32_t valid, const Terms& term, float cut_z,
                           int32_t tie, logits::Counters& sum, const Has& has) {
  uint32_t which = 0;
#pragma unroll
  for (int i = 0; i < kTile / 4; ++i) {
    const float z[4] = {tile.v[i].x, tile.v[i].y, tile.v[i].z, tile.v[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) which |= has(z[j], tile.first + 4 * i + j) ? 1u << (4 * i + j) : 0;
  }
  if ((which & ((1u << (column - tile.first)) - 1)) == 0) sum.add_positive(tile.sum(term, cut_z, tie, valid));
}

// This thread's share of all columns under a cut.
template <bool kDraw>
VS_DEVICE void race_over(const SamplingRows& p, const Row& row, float y_max, int64_t cut, int32_t warps, Race& race) {
  const Columns& columns = row.columns;
  const Terms term(y_max, row.scale);
  const float cut_z = fmaxf(cut_logit(cut), -FLT_MAX);  // -inf has no term and does not race
  const int32_t tie = last_equal(cut, columns);
  float bound = from_bits(0x7f800000u);
  const int32_t lane = threadIdx.x % 32;
  for (int32_t base = 512 * static_cast<int32_t>(threadIdx.x / 32); base < columns.valid; base += 512 * warps) {
    float4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = columns.four(base + 128 * j + 4 * lane);
      leave_out(v[j], cut_z, tie - (base + 128 * j + 4 * lane));
    }
    const float most = fmaxf(fmaxf(largest(v[0]), largest(v[1])), fmaxf(largest(v[2]), largest(v[3])));
    if (!__any_sync(kAllLanes, most >= cut_z)) continue;
    float s[4];
    uint32_t early = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float z[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) e[i] = term(z[i], z[i] >= cut_z);
      s[j] = add(add(e[0], e[1]), add(e[2], e[3]));
      if (kDraw && largest(v[j]) >= cut_z)
        early |= early_of_four(e, columns.vocab_start + base + 128 * j + 4 * lane, p.seed, row.key, bound) << (4 * j);
    }
    if (kDraw)
      look_at_early(
          columns, term, base + 4 * lane, 128, early, p.seed, row.key,
          [&](float z, int32_t column) { return z > cut_z || (z == cut_z && column <= tie); }, bound, race.first);
    race.sum.add_positive(static_cast<double>(tile_of_lane(s)));
  }
}

VS_DEVICE PartOfRow no_part() { return {kNoArrival, kNobody, {0, 0, 0}, 0, 0}; }
VS_DEVICE PartOfRow part_of(const Race& race) {
  PartOfRow part = {race.first.x[0], race.first.x[1]};
  race.sum.get(part.c);
  return part;
}

// The smallest of the lanes' arrivals and, of equals, ids. Ids differ.
VS_DEVICE Words<2> first_of_warp(const Words<2>& mine) {
  const auto high = static_cast<int32_t>(mine.x[0] >> 32), id = static_cast<int32_t>(mine.x[1] >> 32);
  const auto low = static_cast<uint32_t>(mine.x[0]), order = static_cast<uint32_t>(mine.x[1]);
  const int32_t least_high = __reduce_min_sync(kAllLanes, high);
  const uint32_t least_low = __reduce_min_sync(kAllLanes, high == least_high ? low : ~0u);
  const int32_t least_id = __reduce_min_sync(kAllLanes, high == least_high && low == least_low ? id : INT32_MAX);
  const uint32_t its_order = __reduce_min_sync(kAllLanes, id == least_id ? order : ~0u);
  return {{least_high * (int64_t{1} << 32) + least_low, least_id * (int64_t{1} << 32) + its_order}};
}

// What all lanes have, for each of them. kMassPieces: see sum_of_warp; 0: without masses.
template <int kMassPieces>
VS_DEVICE PartOfRow over_warp(PartOfRow mine) {
  if (__any_sync(kAllLanes, mine.arrival != kNoArrival)) {
    const Words<2> first = first_of_warp(mine.first());
    mine.arrival = first.x[0], mine.who = first.x[1];
  }
#pragma unroll
  for (int i = 0; i < kLimbs; ++i) mine.c[i] = sum_of_warp<2>(mine.c[i]);  // of a row below 2^46
  if constexpr (kMassPieces > 0) {
    mine.total = sum_of_warp<kMassPieces>(mine.total);
    mine.above = sum_of_warp<kMassPieces>(mine.above);
  }
  return mine;
}

// What all threads have: each puts its own, and behind a barrier a warp gets the whole. s: a part for every warp.
template <int kMassPieces>
VS_DEVICE void put_part(PartOfRow* s, const PartOfRow& mine) {
  const PartOfRow of_warp = over_warp<kMassPieces>(mine);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = of_warp;
}
template <int kWarps, int kMassPieces>
VS_DEVICE PartOfRow whole_part(const PartOfRow* s) {
  return over_warp<kMassPieces>(threadIdx.x % 32 < kWarps ? s[threadIdx.x % 32] : no_part());
}

}  // namespace vocabshard::sm90::sampling
