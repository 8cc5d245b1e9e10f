// How much of a row lies how deep below its largest columns, and which of them may therefore be the last that a top_p
// keeps.
//
// Nothing here decides: whether the crossing is where it is looked for is seen from exact masses. So estimates are fp32
// and need no order.
#pragma once

#include <cfloat>

#include "sm90/sampling_window.cuh"

namespace vocabshard::sm90::sampling {

constexpr float kDepthsPerY = 128.0f;
constexpr float kSigmas = 5.0f, kBias = 0.001f;  // of an estimated mass
constexpr float kUnseen = 10.0f;                 // times the columns that one stands for: so many none misses
constexpr float kTooDeep = 1e-8f;                // more than what lies below all depths, of 2^18 columns

// Of masses in units of e^top.
struct DepthSums {
  float mass, squares;

  VS_DEVICE void add(float count, float weight) {
    mass += count * weight;
    squares += count * weight * weight;
  }
};

VS_DEVICE float weight_at(int32_t depth) { return ptx::exp2(-mul(static_cast<float>(depth) / kDepthsPerY, kLog2e)); }

// A CTA's columns by their depth top - y, in units of 1 / kDepthsPerY.
struct Depths {
  static constexpr uint32_t kApart = 128;  // neighbours are, or they would meet in few banks

  uint32_t* bins;        // [kDepths]
  float per_z, of_zero;  // a column z is so deep: of_zero + z per_z

  VS_DEVICE Depths(uint32_t* bins, float top, float scale)
      : bins(bins), per_z(-kDepthsPerY * scale), of_zero(kDepthsPerY * top) {}

  VS_DEVICE static uint32_t slot(uint32_t depth) {
    return depth % (kDepths / kApart) * kApart + depth / (kDepths / kApart);
  }
  // the deepest are not counted: one bin would have most columns of most rows
  VS_DEVICE void count(float z) const {
    const float depth = fminf(fmaxf(fma(z, per_z, of_zero), 0.0f), static_cast<float>(kDepths - 1));
    const uint32_t bin = bits(add(depth, kMagic)) - static_cast<uint32_t>(kMagicBits);
    if (bin < kDepths - 1) atomicAdd(&bins[slot(bin)], 1u);
  }
};

// From the deepest up: what lies deeper than this thread's depths, and with them.
struct DeeperSums {
  DepthSums before, behind;
};

// A row's counts and the threads' DeeperSums::before, which stay in shared memory.
template <int kThreads>
VS_DEVICE uint32_t* counts_of(CrossingShared<kThreads>& s) {
  static_assert(sizeof(uint32_t) * kDepths <= sizeof(s.bins));
  return reinterpret_cast<uint32_t*>(s.bins);
}
template <int kThreads>
VS_DEVICE DepthSums* before_of(CrossingShared<kThreads>& s) {
  static_assert(sizeof(DepthSums) * kThreads <= sizeof(s.few));
  return reinterpret_cast<DepthSums*>(s.few);
}

template <int kThreads>
VS_DEVICE int32_t deepest_of(int32_t thread) {
  return kDepths - 1 - kDepths / kThreads * thread;
}

VS_DEVICE DepthSums up_to_lane(DepthSums sums) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const float mass = __shfl_up_sync(kAllLanes, sums.mass, by);
    const float squares = __shfl_up_sync(kAllLanes, sums.squares, by);
    if (threadIdx.x % 32 >= by) sums.mass += mass, sums.squares += squares;
  }
  return sums;
}

template <int kThreads>
VS_DEVICE DeeperSums deeper_sums(const uint32_t* of_row, CrossingShared<kThreads>& s) {
  constexpr int kDepthsOfThread = kDepths / kThreads;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32), warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t deepest = deepest_of<kThreads>(static_cast<int32_t>(threadIdx.x));
  const float step = ptx::exp2(kLog2e / kDepthsPerY);
  uint4 v[kDepthsOfThread / 4];
#pragma unroll
  for (int i = 0; i < kDepthsOfThread / 4; ++i)
    v[i] = __ldcg(reinterpret_cast<const uint4*>(of_row + deepest - 4 * i - 3));
#pragma unroll
  for (int i = 0; i < kDepthsOfThread / 4; ++i) *reinterpret_cast<uint4*>(counts_of(s) + deepest - 4 * i - 3) = v[i];
  DepthSums own = {0.0f, 0.0f};
  float w = weight_at(deepest);
#pragma unroll
  for (int i = 0; i < kDepthsOfThread / 4; ++i) {
    const uint32_t count[4] = {v[i].w, v[i].z, v[i].y, v[i].x};
#pragma unroll
    for (int j = 0; j < 4; ++j, w *= step) own.add(static_cast<float>(count[j]), w);
  }
  const DepthSums up_to = up_to_lane(own);
  // as the thread before has it, to the bit
  const float mass_before = __shfl_up_sync(kAllLanes, up_to.mass, 1);
  const float squares_before = __shfl_up_sync(kAllLanes, up_to.squares, 1);
  __syncthreads();
  if (lane == 31) s.words[warp][0] = bits(up_to.mass), s.words[warp][1] = bits(up_to.squares);
  __syncthreads();
  DepthSums before = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i)
    if (i < warp) {
      before.mass += from_bits(static_cast<uint32_t>(s.words[i][0]));
      before.squares += from_bits(static_cast<uint32_t>(s.words[i][1]));
    }
  const DepthSums behind = {before.mass + up_to.mass, before.squares + up_to.squares};
  if (lane > 0) before.mass += mass_before, before.squares += squares_before;
  before_of(s)[threadIdx.x] = before;
  if (threadIdx.x == 0) s.bin = kThreads, s.few_count = kThreads, s.lowest = kDepths - 1, s.highest = 0;
  __syncthreads();
  return {before, behind};
}

// Where the last kept column is, as columns that are counted by depth tell of which each stands for `each`. `rest`:
// what is left out, in units of e^top. The thread in whose depths it may be reached is found, and a warp takes these:
// one for each end of the window.
template <int kThreads>
VS_DEVICE Window window_of(const DeeperSums& sums, float top, float each, float rest, CrossingShared<kThreads>& s) {
  constexpr int kDepthsOfThread = kDepths / kThreads;
  static_assert(kDepthsOfThread <= 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32), warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t deepest = deepest_of<kThreads>(static_cast<int32_t>(threadIdx.x));
  const DepthSums &before = sums.before, &behind = sums.behind;
  const float unseen = kUnseen * (each - 1.0f), spread = kSigmas * each * ptx::sqrt(1.0f - 1.0f / each);
  // whether what is deeper may be left out for sure, or is too much
  const auto little = [&](const DepthSums& deeper, float weight) {
    const float error = spread * ptx::sqrt(deeper.squares);
    return each * deeper.mass * (1.0f + kBias) + error + unseen * weight + kTooDeep <= rest;
  };
  const auto much = [&](const DepthSums& deeper) {
    return each * deeper.mass * (1.0f - kBias) - spread * ptx::sqrt(deeper.squares) > rest;
  };
  const bool none_behind = threadIdx.x == kThreads - 1;
  if (little(before, weight_at(deepest)) && (none_behind || !little(behind, weight_at(deepest - kDepthsOfThread))))
    atomicMin(&s.bin, static_cast<int32_t>(threadIdx.x));
  // the deepest: less deep, the likeliest columns may make the sum less certain than they make it larger
  if (!much(before) && (none_behind || much(behind))) atomicMin(&s.few_count, threadIdx.x);
  __syncthreads();
  const int32_t thread = warp == 0 ? s.bin : static_cast<int32_t>(s.few_count);
  if (warp < 2 && thread < kThreads) {
    const int32_t depth = deepest_of<kThreads>(thread) - min(lane, kDepthsOfThread - 1);
    const float weight = weight_at(depth);
    DepthSums own = {0.0f, 0.0f};
    if (lane < kDepthsOfThread) own.add(static_cast<float>(counts_of(s)[depth]), weight);
    DepthSums deeper = up_to_lane(own);
    const DepthSums from = before_of(s)[thread];
    deeper.mass += from.mass - own.mass;
    deeper.squares = fmaxf(deeper.squares + from.squares - own.squares, 0.0f);
    if (warp == 0) {
      const int32_t least =
          __reduce_min_sync(kAllLanes, lane < kDepthsOfThread && little(deeper, weight) ? depth : kDepths - 1);
      if (lane == 0) s.lowest = least;
    } else {
      const int32_t behind_all = deepest_of<kThreads>(thread) - kDepthsOfThread + 1;
      const int32_t most =
          __reduce_max_sync(kAllLanes, lane < kDepthsOfThread && much(deeper) ? depth + 1 : behind_all);
      if (lane == 0) s.highest = most;
    }
  }
  __syncthreads();
  const int32_t deep = s.lowest, shallow = s.highest;
  __syncthreads();
  const auto y_at = [&](float depth) { return top - depth / kDepthsPerY; };
  const float slack = (fabsf(top) + static_cast<float>(deep) / kDepthsPerY) * 0x1p-21f;
  return {deep == kDepths - 1 ? -FLT_MAX : y_at(static_cast<float>(deep) + 0.51f) - slack,
          shallow == 0 ? -neg_inf() : y_at(static_cast<float>(shallow) - 0.51f) + slack};
}

}  // namespace vocabshard::sm90::sampling
