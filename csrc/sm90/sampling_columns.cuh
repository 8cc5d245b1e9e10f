// One read of a CTA's share of a row, once it is known in which window of y the last kept column lies: candidates are
// listed, masses summed exactly, and what is above the window is raced and summed.
#pragma once

#include "sm90/sampling_window.cuh"

namespace vocabshard::sm90::sampling {

constexpr int kPieces = 4;         // float4s of a thread whose tiles are added together
constexpr int kHighBits = 18;      // of a mass, below its high part
constexpr float kHigh = 0x1p+41f;  // one unit in its last place is 2^kHighBits

// Masses of a thread's columns: their high parts, and what is left, rounded to the nearest integer.
struct Mass {
  uint32_t high;
  int32_t low;

  VS_DEVICE int64_t whole() const { return (static_cast<int64_t>(high) << kHighBits) + low; }
};

// Units of masses, and what is worth while.
struct Scales {
  Terms term;
  float to_mass;  // from terms, in units of 2^R
  float seen;     // columns below have no mass

  VS_DEVICE Scales(float y_max, float scale) : term(y_max, scale) {
    const int32_t k_max = exp_k(clamp_logit(y_max)), R = 12582912 - static_cast<int32_t>(term.magic);
    to_mass = from_bits(static_cast<uint32_t>(127 + R - k_max + kMassBits) << 23);
    seen = mul(static_cast<float>(k_max - kMassBits - 4), logits::kLn2f);
  }
};

// Of four pieces of four columns each that a lane has of tiles of four lanes: which of a tile's columns are in `which`,
// bit 4 i + j for the j-th column of the i-th piece; for every lane the tile of its lane % 4 th piece.
VS_DEVICE uint32_t tile_mask(uint32_t which) {
  const uint32_t lane = threadIdx.x % 4;
  uint32_t mask = 0;
#pragma unroll
  for (uint32_t by = 0; by < 4; ++by) {
    const uint32_t other = by == 0 ? which : __shfl_xor_sync(kAllLanes, which, by);
    mask |= (other >> (4 * lane) & 15) << (4 * (lane ^ by));
  }
  return mask;
}

// The candidates of a tile, which begins at column `first`, by one thread.
template <int kThreads>
VS_DEVICE void list_tile(const Columns& columns, uint32_t mask, int32_t first, float without, float with,
                         Candidate* list, uint32_t room, uint32_t& count) {
  if (mask == 0) return;
  const auto all = static_cast<uint32_t>(__popc(mask));
  uint32_t place = atomicAdd(&count, all);
  if (all > 1) with = -1.0f;
#pragma unroll 1
  for (; mask != 0; mask &= mask - 1, ++place) {
    const int32_t column = first + __ffs(static_cast<int>(mask)) - 1;
    if (place < room) list[place] = {candidate(columns.row[column], column), with, without};
    if (all > 1) with = without = 0.0f;
  }
}

// Columns `begin`, a multiple of 16, to `end`: a float4 of a thread in turn, the next two on their way. Candidates come
// behind the s.count of before into `list`, `room` at most.
template <int kThreads>
VS_DEVICE void collect_columns(const SamplingRows& p, const Row& row, const Window& window, const Scales& scales,
                               int32_t begin, int32_t end, Candidate* list, uint32_t room, Collected& to,
                               CrossingShared<kThreads>& s) {
  constexpr int32_t kStep = 4 * kThreads;
  const Columns& columns = row.columns;
  const Terms& term = scales.term;
  const auto load = [&](int32_t at) { return columns.four(at < end ? at : columns.valid); };
  Mass all = {0, 0}, above = {0, 0};
  uint32_t which = 0, sure = 0, early = 0;  // bit 4 i + j: the j-th column of the i-th piece of four
  float sums[kPieces] = {0.0f, 0.0f, 0.0f, 0.0f}, with[kPieces] = {0.0f, 0.0f, 0.0f, 0.0f};
  int32_t at = begin + 4 * static_cast<int32_t>(threadIdx.x);
  float4 v = load(at), next = load(at + kStep);
  // all lanes of a warp stay: tiles are of four
#pragma unroll 1
  for (int32_t pieces = 0, block = begin; block < end;) {
    const float4 coming = load(at + 2 * kStep);
    const int shift = 4 * (pieces % kPieces);
#pragma unroll
    for (int i = 0; i + 1 < kPieces; ++i) sums[i] = sums[i + 1], with[i] = with[i + 1];
    sums[kPieces - 1] = with[kPieces - 1] = 0.0f;
    if (__any_sync(kAllLanes, mul(largest(v), term.scale) >= scales.seen)) {
      const float z[4] = {v.x, v.y, v.z, v.w};
      float e[4], e_with[4];
      uint32_t over = 0, inside = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float y = mul(z[j], term.scale);
        const float x = logits::scaled_exp(fmaxf(y, term.lowest), term.magic);
        const float high = fma(x, scales.to_mass, kHigh), low = fma(x, scales.to_mass, -add(high, -kHigh));
        const uint32_t m_high = bits(high) - bits(kHigh);
        const auto m_low = static_cast<int32_t>(bits(add(low, kMagic))) - kMagicBits;
        const bool kept = y > window.high;
        all.high += m_high;
        all.low += m_low;
        above.high += kept ? m_high : 0;
        above.low += kept ? m_low : 0;
        e[j] = kept ? x : 0.0f;
        e_with[j] = y >= window.low ? x : 0.0f;
        over |= kept;
        inside |= y >= window.low && !kept ? 1u << j : 0;
      }
      sums[kPieces - 1] = add(add(e[0], e[1]), add(e[2], e[3]));
      with[kPieces - 1] = add(add(e_with[0], e_with[1]), add(e_with[2], e_with[3]));
      sure |= over;
      which |= inside << shift;
      if (p.draw && over != 0) early |= early_of_four(e, columns.vocab_start + at, p.seed, row.key, to.bound) << shift;
    }
    v = next, next = coming;
    at += kStep, block += kStep, ++pieces;
    if (pieces % kPieces != 0 && block < end) continue;
    if (__any_sync(kAllLanes, (sure | which) != 0)) {
      // the first of the pieces, where they are fewer than four of them: those before are none
      const int32_t base = at - kPieces * kStep;
      const int32_t missing = (kPieces - pieces % kPieces) % kPieces;
      which <<= 4 * missing, early <<= 4 * missing;
      if (early != 0)
        look_at_early(
            columns, term, base, kStep, early, p.seed, row.key,
            [&](float z, int32_t) { return mul(z, term.scale) > window.high; }, to.bound, to.race.first);
      const float tile = tile_of_lane(sums);
      to.race.sum.add_positive(static_cast<double>(tile));
      if (__any_sync(kAllLanes, which != 0)) {
        const float tile_with = tile_of_lane(with);
        list_tile<kThreads>(columns, tile_mask(which), base - 4 * (threadIdx.x % 4) + kStep * (threadIdx.x % 4), tile,
                            tile_with, list, room, s.count);
      }
    }
    which = sure = early = 0;
    to.total += all.whole(), to.above += above.whole();
    all = above = {0, 0};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) sums[i] = with[i] = 0.0f;
  }
}

}  // namespace vocabshard::sm90::sampling
