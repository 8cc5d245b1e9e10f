// The last place, best first, at which a count or a mass is reached, by one CTA: among listed candidates, or, where
// these turn out not to be enough, all columns of a row.
#pragma once

#include <cfloat>

#include "sm90/sampling_race.cuh"

namespace vocabshard::sm90::sampling {

constexpr int kCrossingBits = 10, kCrossingBins = 1 << kCrossingBits;
constexpr int kFewPlaces = 128;  // that are compared with each other

template <int kThreads>
struct CrossingShared {
  Bin bins[kCrossingBins];
  int64_t few[kFewPlaces], few_mass[kFewPlaces];
  int64_t words[kThreads / 32][kLimbs];
  Partial of_warp[kThreads / 32];
  PartOfRow parts[kThreads / 32];
  int64_t above, answer;
  int32_t bin;
  uint32_t count, few_count;
  int32_t lowest, highest;  // order
  bool last;
};

template <int kThreads>
struct Listed {
  const int64_t* places;
  int32_t count;

  VS_DEVICE bool few() const { return count <= kFewPlaces; }

  template <class Take>
  VS_DEVICE void each(const Take& take) const {
    for (int32_t i = threadIdx.x; i < count; i += kThreads) take(places[i]);
  }
};

template <int kThreads>
struct WholeRow {
  Columns columns;

  VS_DEVICE bool few() const { return false; }

  template <class Take>
  VS_DEVICE void each(const Take& take) const {
    for (int32_t at = 4 * threadIdx.x; at < columns.valid; at += 4 * kThreads) {
      const float4 v = columns.four(at);
      const float z[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (at + j < columns.valid) take(place_of(z[j], columns.vocab_start + at + j));
    }
  }
};

struct Weigh {
  bool by_mass;
  float scale;
  int32_t k_max;

  VS_DEVICE int64_t operator()(int64_t place) const {
    return by_mass ? mass_fast(mul(logit_of(static_cast<int32_t>(place >> 32)), scale), k_max) : 1;
  }
};

// Whether `wanted` is reached among the places in [low, high]; `found`: the place at which it is.
template <int kThreads, class Source>
__device__ __noinline__ bool crossing(const Source& source, CrossingShared<kThreads>& s, const Weigh& weigh,
                                      int64_t wanted, int64_t low, int64_t high, int64_t& found) {
  constexpr int kBinsOfThread = kCrossingBins / kThreads;
  static_assert(kThreads >= kFewPlaces);
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (wanted < 1) return false;
  __syncthreads();
  if (threadIdx.x == 0) s.few_count = 0, s.count = kFewPlaces + 1, s.answer = kKeepAll;
  __syncthreads();
  while (!source.few() && s.count > kFewPlaces) {
    __syncthreads();
    const uint64_t width = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    const int shift = max(0, 64 - kCrossingBits - __clzll(static_cast<int64_t>(width)));
    for (int i = threadIdx.x; i < kCrossingBins; i += kThreads)
      *reinterpret_cast<uint4*>(&s.bins[i]) = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) s.bin = -1;
    __syncthreads();
    source.each([&](int64_t place) {
      if (place < low || place > high) return;
      const uint64_t depth = static_cast<uint64_t>(high) - static_cast<uint64_t>(place);
      add_to(s.bins[depth >> shift], 1, weigh.by_mass, weigh.by_mass ? weigh(place) : 0);
    });
    __syncthreads();
    const Bin* const own = s.bins + kBinsOfThread * threadIdx.x;
    const auto weight = [&](int i) { return weigh.by_mass ? whole_mass(own[i]) : own[i].count; };
    int64_t all = 0;
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) all += weight(i);
    int64_t up_to = all;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, up_to, step);
      if (lane >= step) up_to += other;
    }
    if (lane == 31) s.words[warp][0] = up_to;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) up_to += w < warp ? s.words[w][0] : 0;
    int64_t before = up_to - all;
    if (before < wanted && wanted <= up_to) {
      int i = 0;
      while (before + weight(i) < wanted) before += weight(i++);
      s.bin = kBinsOfThread * threadIdx.x + i;
      s.above = before;
      s.count = own[i].count;
    }
    __syncthreads();
    if (s.bin < 0) return false;
    wanted -= s.above;
    high = static_cast<int64_t>(static_cast<uint64_t>(high) - (static_cast<uint64_t>(s.bin) << shift));
    if (static_cast<uint64_t>(high) - static_cast<uint64_t>(low) >> shift != 0)
      low = high - static_cast<int64_t>((uint64_t{1} << shift) - 1);
  }
  source.each([&](int64_t place) {
    if (place < low || place > high) return;
    const uint32_t i = atomicAdd(&s.few_count, 1u);
    s.few[i] = place;
    s.few_mass[i] = weigh(place);
  });
  __syncthreads();
  const auto count = static_cast<int32_t>(s.few_count);
  if (threadIdx.x < count) {
    const int64_t mine = s.few[threadIdx.x];
    int64_t above = 0;
    for (int32_t i = 0; i < count; ++i) above += s.few[i] > mine ? s.few_mass[i] : 0;
    if (above < wanted && wanted <= above + s.few_mass[threadIdx.x]) s.answer = mine;
  }
  __syncthreads();
  found = s.answer;
  return found != kKeepAll;
}

// The cut at a place: equals behind it are left out if `split`.
template <class Source>
VS_DEVICE int64_t cut_at(const Source& source, int64_t place, bool split) {
  bool behind = false;
  if (split) source.each([&](int64_t other) { behind |= other >> 32 == place >> 32 && other < place; });
  return __syncthreads_or(behind) ? place : place & ~int64_t{0xffffffff};
}

VS_DEVICE Words<2> range_of(int32_t lowest, int32_t highest) {
  return {{static_cast<int64_t>(lowest) * (int64_t{1} << 32),
           static_cast<int64_t>(highest) * (int64_t{1} << 32) + 0xffffffff}};
}

// The row's cut, of a source that holds all columns the steps may keep, between two orders. False: it does not.
template <int kThreads, class Source>
__device__ __noinline__ bool find_cut(const Source& source, CrossingShared<kThreads>& s, const SamplingRows& p,
                                      const Row& row, float y_max, int32_t lowest, int32_t highest, int64_t& cut) {
  const float scale = row.scale;
  const int32_t k_max = exp_k(clamp_logit(y_max));
  const Words<2> range = range_of(lowest, highest);
  cut = kKeepAll;
  for (int k = 0; k < p.steps; ++k) {
    const SamplingStep& step = p.step[k];
    int64_t next;
    if (step.kind == kMinP) {
      const float threshold = static_cast<float>(add(static_cast<double>(y_max), step.ln));
      Words<1> order = {{INT32_MAX}};
      source.each([&](int64_t place) {
        const auto other = static_cast<int32_t>(place >> 32);
        if (mul(logit_of(other), scale) >= threshold) order.x[0] = min(order.x[0], static_cast<int64_t>(other));
      });
      next = over_block<kThreads / 32>(s.words, order, Smaller()).x[0] * (int64_t{1} << 32);
    } else {
      const bool by_mass = step.kind == kTopP;
      const Weigh weigh = {by_mass, scale, k_max};
      int64_t wanted = min(step.number, static_cast<int64_t>(row.columns.valid));
      if (by_mass) {
        Words<1> total = {{0}};
        source.each([&](int64_t place) { total.x[0] += place >= cut ? weigh(place) : 0; });
        wanted = share_of(step.number, over_block<kThreads / 32>(s.words, total, Sum()).x[0]);
      }
      const int64_t low = by_mass ? max(range.x[0], cut) : range.x[0];
      if (!crossing(source, s, weigh, wanted, low, range.x[1], next)) return false;
      next = cut_at(source, next, by_mass);
    }
    cut = max(cut, next);
  }
  return true;
}

// The row's results, of what all threads have of what is kept.
template <int kThreads>
VS_DEVICE void finish_race(const SamplingStream& call, const Row& row, const Target& target, int64_t cut, float y_max,
                           const PartOfRow& mine, CrossingShared<kThreads>& s) {
  put_part<0>(s.parts, mine);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const PartOfRow whole = whole_part<kThreads / 32, 0>(s.parts);
  put_row(call, row, target, cut, whole.first(), whole.partial(y_max));
}

VS_DEVICE int64_t candidate(float z, int32_t column) {
  return static_cast<int64_t>((static_cast<uint64_t>(bits(z)) << 32) | static_cast<uint32_t>(column));
}
VS_DEVICE int64_t place_of_candidate(int64_t candidate, const Columns& columns) {
  const auto word = static_cast<uint64_t>(candidate);
  return place_of(from_bits(static_cast<uint32_t>(word >> 32)), columns.vocab_start + static_cast<uint32_t>(word));
}

// The places of `count` candidates in their place; their lowest and highest orders into s.
template <int kThreads>
VS_DEVICE Listed<kThreads> place_listed(int64_t* list, uint32_t count, const Columns& columns,
                                        CrossingShared<kThreads>& s) {
  int32_t lowest = INT32_MAX, highest = INT32_MIN;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    list[i] = place_of_candidate(__ldcg(list + i), columns);
    const auto order = static_cast<int32_t>(list[i] >> 32);
    lowest = min(lowest, order);
    highest = max(highest, order);
  }
  lowest = __reduce_min_sync(kAllLanes, lowest);
  highest = __reduce_max_sync(kAllLanes, highest);
  if (threadIdx.x % 32 == 0) {
    atomicMin(&s.lowest, lowest);
    atomicMax(&s.highest, highest);
  }
  __syncthreads();
  return {list, static_cast<int32_t>(count)};
}

// By all columns, where candidates are not enough.
template <int kThreads>
VS_DEVICE int64_t cut_of_all(const SamplingRows& p, const Row& row, float y_max, CrossingShared<kThreads>& s) {
  int64_t cut;
  find_cut(WholeRow<kThreads>{row.columns}, s, p, row, y_max, order_of(neg_inf()), order_of(-neg_inf()), cut);
  return cut;
}

template <int kThreads>
__device__ __noinline__ void race_over_all(const SamplingRows& p, const Row& row, float y_max, int64_t cut,
                                           Race& race) {
  if (p.draw)
    race_over<true>(p, row, y_max, cut, kThreads / 32, race);
  else
    race_over<false>(p, row, y_max, cut, kThreads / 32, race);
}

}  // namespace vocabshard::sm90::sampling
