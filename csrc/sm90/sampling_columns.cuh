// One read of a CTA's share of a row, once it is known in which window of y the last kept column lies: candidates are
// listed, masses summed exactly, and what is above the window is raced and summed.
#pragma once

#include "sm90/sampling_window.cuh"

namespace vocabshard::sm90::sampling {

constexpr int kHighBits = 18;      // of a mass, below its high part
constexpr float kHigh = 0x1p+41f;  // one unit in its last place is 2^kHighBits

// Masses of columns: sums of the bits of their high parts, and of what is left, rounded to the nearest integer.
struct Mass {
  uint32_t high = 0, low = 0;

  // Of so many columns, a tile's at most.
  VS_DEVICE int64_t whole(uint32_t columns) const {
    return (static_cast<int64_t>(high - columns * bits(kHigh)) << kHighBits) +
           static_cast<int32_t>(low - columns * static_cast<uint32_t>(kMagicBits));
  }
};

// Units of masses, and what is worth while.
struct Scales {
  Terms term;
  float to_mass;  // from terms, in units of 2^R
  float seen;     // y below have no mass

  VS_DEVICE Scales(float y_max, float scale) : term(y_max, scale) {
    const int32_t k_max = exp_k(clamp_logit(y_max)), R = 12582912 - static_cast<int32_t>(term.magic);
    to_mass = from_bits(static_cast<uint32_t>(127 + R - k_max + kMassBits) << 23);
    seen = mul(static_cast<float>(k_max - kMassBits - 4), logits::kLn2f);
  }
};

// The candidates of a tile, which begins at column `first`, by one thread.
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

VS_DEVICE void scaled(const TileOfColumns& tile, float scale, float (&y)[kTile]) {
#pragma unroll
  for (int i = 0; i < kTile / 4; ++i) {
    y[4 * i] = mul(tile.v[i].x, scale);
    y[4 * i + 1] = mul(tile.v[i].y, scale);
    y[4 * i + 2] = mul(tile.v[i].z, scale);
    y[4 * i + 3] = mul(tile.v[i].w, scale);
  }
}

// Columns `begin`, a multiple of 16, to `end`: a tile of a thread in turn, the next one on its way. Candidates come
// behind the s.count of before into `list`, `room` at most.
template <int kThreads>
VS_DEVICE void collect_columns(const SamplingRows& p, const Row& row, const Window& window, const Scales& scales,
                               int32_t begin, int32_t end, Candidate* list, uint32_t room, Collected& to,
                               CrossingShared<kThreads>& s) {
  const Terms term = scales.term;
  const float low = fmaxf(window.low, scales.seen), high = window.high;
  const Columns share = {row.columns.row, end, row.columns.vocab_start};
  constexpr int32_t kStep = kTile * kThreads;
  int32_t at = begin + kTile * static_cast<int32_t>(threadIdx.x);
  if (at >= end) return;
  float y[kTile];
  scaled(TileOfColumns(share, at), term.scale, y);
#pragma unroll 1
  for (bool more = true; more; at += kStep) {
    more = at + kStep < end;
    const TileOfColumns next(share, more ? at + kStep : at);
    Mass all, above;
    float e[kTile], e_with[kTile];
    uint32_t kept = 0, reach = 0;  // bit j: the j-th column is above the window, or above its lower end
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      const float x = logits::scaled_exp(fmaxf(y[j], term.lowest), term.magic);
      const float upper = fma(x, scales.to_mass, kHigh), rest = fma(x, scales.to_mass, -add(upper, -kHigh));
      const uint32_t m_high = bits(upper), m_low = bits(add(rest, kMagic));
      const bool is_kept = y[j] > high, reaches = y[j] >= low;
      all.high += m_high, all.low += m_low;
      ptx::add_if(is_kept, above.high, m_high);
      ptx::add_if(is_kept, above.low, m_low);
      ptx::add_if(is_kept, kept, 1u << j);
      ptx::add_if(reaches, reach, 1u << j);
      e[j] = is_kept ? x : 0.0f;
      e_with[j] = reaches ? x : 0.0f;
    }
    to.total += all.whole(kTile), to.above += above.whole(__popc(kept));
    const float sum = tree16(e);
    to.race.sum.add_positive(static_cast<double>(sum));
    list_tile(share, reach & ~kept, at, sum, tree16(e_with), list, room, s.count);
    if (p.draw && kept != 0) {
      uint32_t early = 0;
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        const float terms[4] = {e[4 * i], e[4 * i + 1], e[4 * i + 2], e[4 * i + 3]};
        early |= early_of_four(terms, share.vocab_start + at + 4 * i, p.seed, row.key, to.bound) << (4 * i);
      }
      look_at_early(
          share, term, at, 4, early, p.seed, row.key, [&](float z, int32_t) { return mul(z, term.scale) > high; },
          to.bound, to.race.first);
    }
    scaled(next, term.scale, y);
  }
}

}  // namespace vocabshard::sm90::sampling
