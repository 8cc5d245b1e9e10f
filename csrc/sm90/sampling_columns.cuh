// One read of a CTA's share of a row, once it is known in which window of y the last kept column lies: candidates are
// listed, masses summed exactly, and what is above the window is raced and summed.
#pragma once

#include "sm90/sampling_noise.cuh"
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

// A tile's columns; what is past the end is -inf.
VS_DEVICE void load_tile(const Columns& columns, int32_t first, float (&z)[kTile]) {
  if (first + kTile <= columns.valid) {
#pragma unroll
    for (int i = 0; i < kTile; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(columns.row + first + i);
      z[i] = v.x, z[i + 1] = v.y, z[i + 2] = v.z, z[i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTile; ++i) z[i] = first + i < columns.valid ? columns.row[first + i] : neg_inf();
  }
}

template <int kThreads>
struct EarlyShared {
  int32_t bound;  // the lowest of all threads', as bits; infinite at first
  int32_t columns[kThreads / 32][64];
};

// Kept columns that may come first. They wait until a warp has one for each of its lanes, as their noise is made again
// to be sure.
template <int kThreads>
class Early {
 public:
  VS_DEVICE Early(const SamplingRows& p, const Row& row, const Terms& term, Collected& to, EarlyShared<kThreads>& s)
      : p_(p), row_(row), term_(term), to_(to), s_(s) {}

  VS_DEVICE float bound() const {
    return fminf(to_.bound, from_bits(static_cast<uint32_t>(*static_cast<volatile const int32_t*>(&s_.bound))));
  }

  // By whole warps: those of a lane's columns from `first` on, bit j for the j-th. The last ones: none waits any
  // longer.
  VS_DEVICE void add(uint32_t which, int32_t first, bool last) {
    const uint32_t lane = threadIdx.x % 32;
    int32_t* const columns = s_.columns[threadIdx.x / 32];
#pragma unroll 1
    for (;; which &= which - 1) {
      const uint32_t lanes = __ballot_sync(kAllLanes, which != 0);
      if (lanes == 0 && !(last && count_ > 0)) return;
      if (which != 0) columns[count_ + __popc(lanes & ((1u << lane) - 1))] = first + __ffs(static_cast<int>(which)) - 1;
      count_ += __popc(lanes);
      if (lanes != 0 && count_ < 32) continue;
      __syncwarp();
      const int32_t left = max(count_ - 32, 0), mine = left + static_cast<int32_t>(lane);
      if (mine < count_) look(columns[mine]);
      __syncwarp();
      count_ = left;
    }
  }

 private:
  VS_DEVICE void look(int32_t column) {
    const float z = row_.columns.row[column], x = term_(z, true);
    const int64_t id = row_.columns.vocab_start + column;
    const uint32_t word = column_word(id, 0, p_.seed, row_.key);
    if (!is_early(word, x, bound())) return;
    const float clock = clock_at(word, id, p_.seed, row_.key);
    const int64_t arrival = arrival_of(clock, clamp_logit(mul(z, term_.scale)));
    to_.race.first = Smaller()(to_.race.first, Words<2>{{arrival, who_is(id, z)}});
    atomicMin(&s_.bound, static_cast<int32_t>(bits(bound_of(clock, x))));
  }

  const SamplingRows& p_;
  const Row& row_;
  const Terms& term_;
  Collected& to_;
  EarlyShared<kThreads>& s_;
  int32_t count_ = 0;
};

// Columns `begin`, a multiple of 16, to `end`: a tile of a thread in turn, the next one on its way. Candidates come
// behind the s.count of before into `list`, `room` at most.
template <int kThreads>
VS_DEVICE void collect_columns(const SamplingRows& p, const Row& row, const Window& window, const Scales& scales,
                               const uint32_t* noise, int32_t begin, int32_t end, Candidate* list, uint32_t room,
                               Collected& to, CrossingShared<kThreads>& s, EarlyShared<kThreads>& s_early) {
  const Terms term = scales.term;
  const float low = fmaxf(window.low, scales.seen), high = window.high;  // without mass none is the last
  const Columns share = {row.columns.row, end, row.columns.vocab_start};
  constexpr int32_t kStep = kTile * kThreads;
  int32_t at = begin + kTile * static_cast<int32_t>(threadIdx.x);
  int32_t of_warp = at - kTile * static_cast<int32_t>(threadIdx.x % 32);
  if (of_warp >= end) return;
  Early<kThreads> early(p, row, term, to, s_early);
  float large = large_term(to.bound);
  // the word that has the bits of the tile that begins there
  const auto noise_at = [&](int32_t column) { return p.draw && column < end ? noise[column / 32u] : 0; };
  uint32_t noisy = noise_at(at);
  float y[kTile], next[kTile];
  const auto scale = [&] {  // in front of the loop and at its end, so that nothing is moved from next to y
#pragma unroll
    for (int j = 0; j < kTile; ++j) y[j] = mul(next[j], term.scale);
  };
  load_tile(share, at, next);
  scale();
#pragma unroll 1
  for (;; at += kStep) {
    const bool more = (of_warp += kStep) < end;
    if (more) load_tile(share, at + kStep, next);
    const uint32_t noisy_next = noise_at(at + kStep);
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
    if (p.draw) {
      uint32_t larger = 0;
      if (sum >= large) {  // no term is larger than the sum
        large = large_term(early.bound());
#pragma unroll
        for (int j = 0; j < kTile; ++j) ptx::add_if(e[j] >= large, larger, 1u << j);
      }
      early.add((noisy >> at % 32u & kept) | larger, at, !more);
    }
    if (!more) break;
    noisy = noisy_next;
    scale();
  }
}

}  // namespace vocabshard::sm90::sampling
