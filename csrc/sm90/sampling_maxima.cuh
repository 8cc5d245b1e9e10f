// Which few groups of a row's columns may have what its steps keep, by the maxima of all groups; and those columns.
#pragma once

#include <cfloat>

#include "sm90/sampling_few.cuh"

namespace vocabshard::sm90::sampling {

constexpr int kFewThreads = 128, kFewWarps = kFewThreads / 32;
// Bins of the depth d = y_max - y of maxima, by the bits of d + 1: 64 an octave.
constexpr int kMaximaDepths = 1024, kMaximaShift = 17, kMaximaDepthsOfThread = kMaximaDepths / kFewThreads;
constexpr int kAtOnce = 5, kPiecesOfGroups = 8;  // float4s of maxima
// all groups of a row fit into the bins' memory
static_assert(kStreamedColumns / kMaximaColumns <= sizeof(Bin) * kCrossingBins / sizeof(int32_t));
static_assert(kMaximaDepths <= sizeof(Bin) * kCrossingBins / sizeof(int32_t));

using FewShared = CrossingShared<kFewThreads>;

VS_DEVICE int32_t bin_of_maximum(float depth) {
  return min(static_cast<int32_t>((bits(add(fmaxf(depth, 0.0f), 1.0f)) - 0x3f800000u) >> kMaximaShift),
             kMaximaDepths - 1);
}

VS_DEVICE float depth_of_maximum(int32_t bin) {
  return add(from_bits(0x3f800000u + (static_cast<uint32_t>(bin) << kMaximaShift)), -1.0f);
}
// Below any y whose depth is less.
VS_DEVICE float y_at_depth(float y_max, float depth) {
  return add(add(y_max, -depth), -mul(add(fabsf(y_max), depth), 0x1p-21f));
}

// Maxima of groups; -inf past the last. Those of a usual row are read once.
struct Maxima {
  static constexpr int kBatch = 4 * kAtOnce * kFewThreads;
  const float* at;  // aligned to 16
  int32_t groups;
  float4 v[kAtOnce];

  VS_DEVICE Maxima(const float* at, int32_t groups) : at(at), groups(groups) { load(0); }

  VS_DEVICE float4 four(int32_t group) const {
    if (group + 4 <= groups) return *reinterpret_cast<const float4*>(at + group);
    float4 v = make_float4(neg_inf(), neg_inf(), neg_inf(), neg_inf());
    if (group < groups) v.x = at[group];
    if (group + 1 < groups) v.y = at[group + 1];
    if (group + 2 < groups) v.z = at[group + 2];
    return v;
  }

  VS_DEVICE int32_t group(int32_t start, int i) const {
    return start + 4 * (kFewThreads * i + static_cast<int32_t>(threadIdx.x));
  }
  VS_DEVICE void load(int32_t start) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) v[i] = four(group(start, i));
  }

  // take(maximum) of all, by all threads
  template <class Take>
  VS_DEVICE void each(const Take& take) {
    each_batch([&](float z) { return take(z), false; }, [](uint32_t, int32_t) {});
  }
  // found(which, start), where has(maximum) of any of a thread's: bit 4 i + j is that of group(start, i) + j.
  template <class Has, class Found>
  VS_DEVICE void each_batch(const Has& has, const Found& found) {
#pragma unroll 1
    for (int32_t start = 0; start < groups; start += kBatch) {
      if (groups > kBatch) load(start);
      uint32_t which = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) which |= has(z[j]) ? 1u << (4 * i + j) : 0;
      }
      if (which != 0) found(which, start);
    }
  }
};

// A y that `wanted` groups reach, or, unless `exact`, the best groups of as many threads; -FLT_MAX where they are
// fewer, or none is near.
VS_DEVICE float bound_of_maxima(Maxima& maxima, float scale, float y_max, int32_t wanted, bool exact, FewShared& s) {
  auto* const bins = reinterpret_cast<uint32_t*>(s.bins);
  __syncthreads();
  for (int i = threadIdx.x; i < kMaximaDepths; i += kFewThreads) bins[i] = 0;
  if (threadIdx.x == 0) s.bin = kMaximaDepths - 1;
  __syncthreads();
  const auto count = [&](float z) {
    if (!is_neg_inf(z)) atomicAdd(&bins[bin_of_maximum(add(y_max, -mul(z, scale)))], 1u);
  };
  float best = neg_inf();
  maxima.each([&](float z) {
    if (exact) count(z);
    best = fmaxf(best, z);
  });
  if (!exact) count(best);
  __syncthreads();
  int32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kMaximaDepthsOfThread; ++i)
    mine += static_cast<int32_t>(bins[kMaximaDepthsOfThread * threadIdx.x + i]);
  const auto up_to = static_cast<int32_t>(up_to_thread<kFewWarps>(s.words, mine));
  if (up_to - mine < wanted && wanted <= up_to) {
    int32_t bin = kMaximaDepthsOfThread * threadIdx.x, reached = up_to - mine;
    while ((reached += static_cast<int32_t>(bins[bin])) < wanted) ++bin;
    s.bin = bin;
  }
  __syncthreads();
  if (s.bin == kMaximaDepths - 1) return -FLT_MAX;
  return y_at_depth(y_max, depth_of_maximum(s.bin + 1));
}

// The groups whose maxima reach `low`, into s.bins. Returns how many.
VS_DEVICE uint32_t list_groups(Maxima& maxima, float scale, float low, FewShared& s) {
  auto* const groups = reinterpret_cast<int32_t*>(s.bins);
  if (threadIdx.x == 0) s.few_count = 0;
  __syncthreads();
  maxima.each_batch([&](float z) { return mul(z, scale) >= low; },
                    [&](uint32_t which, int32_t start) {
                      uint32_t to = atomicAdd(&s.few_count, static_cast<uint32_t>(__popc(which)));
#pragma unroll 1
                      for (; which != 0; which &= which - 1, ++to) {
                        const int32_t bit = __ffs(static_cast<int>(which)) - 1;
                        groups[to] = maxima.group(start, bit / 4) + bit % 4;
                      }
                    });
  __syncthreads();
  return s.few_count;
}

// The columns of the `count` listed groups whose y reach `low`, into `list` and, the first of them, s.few. Returns how
// many there are.
VS_DEVICE uint32_t list_columns(const Row& row, uint32_t count, float low, int64_t* list, FewShared& s) {
  const auto* const groups = reinterpret_cast<const int32_t*>(s.bins);
  s.few[threadIdx.x] = kKeepAll;  // before any
  if (threadIdx.x == 0) s.count = 0, s.lowest = INT32_MAX, s.highest = INT32_MIN;
  __syncthreads();
  const auto pieces = static_cast<int32_t>(16 * count);
#pragma unroll 1
  for (int32_t first = threadIdx.x; first < pieces; first += kPiecesOfGroups * kFewThreads) {
    const auto column_of = [&](int32_t i) {
      const int32_t piece = first + kFewThreads * i;
      return piece < pieces ? kMaximaColumns * groups[piece / 16] + 4 * (piece % 16) : row.columns.valid;
    };
    float4 v[kPiecesOfGroups];
#pragma unroll
    for (int i = 0; i < kPiecesOfGroups; ++i) v[i] = row.columns.four(column_of(i));
    uint32_t which = 0;
#pragma unroll
    for (int i = 0; i < kPiecesOfGroups; ++i) {
      const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) which |= mul(z[j], row.scale) >= low ? 1u << (4 * i + j) : 0;
    }
    if (which == 0) continue;
    uint32_t to = atomicAdd(&s.count, static_cast<uint32_t>(__popc(which)));
#pragma unroll 1
    for (; which != 0; which &= which - 1, ++to) {
      const int32_t bit = __ffs(static_cast<int>(which)) - 1, column = column_of(bit / 4) + bit % 4;
      const float z = row.columns.row[column];
      if (to < kFewPlaces) s.few[to] = place_of(z, row.columns.vocab_start + column);
      if (to < kListed) list[to] = candidate(z, column);
    }
  }
  __syncthreads();
  return s.count;
}

// What a top_k of `wanted` may keep. Returns how many columns, as above; low: they and no others reach it.
VS_DEVICE uint32_t list_best(const Row& row, Maxima& maxima, float y_max, int32_t wanted, int64_t* list, float& low,
                             FewShared& s) {
  bool exact = wanted > kFewThreads / 2;
#pragma unroll 1
  while (true) {
    low = bound_of_maxima(maxima, row.scale, y_max, wanted, exact, s);
    const uint32_t found = list_groups(maxima, row.scale, low, s);
    if (exact || found <= 4 * static_cast<uint32_t>(wanted)) return list_columns(row, found, low, list, s);
    exact = true;  // many of the best are of few threads
  }
}

}  // namespace vocabshard::sm90::sampling
