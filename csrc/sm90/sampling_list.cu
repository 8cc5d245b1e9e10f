// Rows of which a top_k keeps few columns (sampling_stream.h): of the maxima of a row's tiles the k-th largest bounds
// its k-th best column from below, and few tiles have one that reaches it. A CTA a row reads these alone.
#include <cfloat>

#include "sm90/launch.h"
#include "sm90/sampling_finish.cuh"
#include "sm90/sampling_grids.h"

namespace vocabshard::sm90::sampling {

namespace {

constexpr int kThreads = kCollectThreads, kWarps = kThreads / 32;
constexpr int kDepths = 2048, kDepthShift = 16;  // bins of depth d = y_max - y, by the bits of d + 1: 128 an octave
constexpr int kDepthsOfThread = kDepths / kThreads;
constexpr int kMaximaThreads = 256;
constexpr int kPiecesAtOnce = 5;  // float4s of maxima
constexpr int kMostTiles = sizeof(CrossingShared::bins) / sizeof(int32_t);
static_assert(kDepths <= kMostTiles && kStreamedK <= kThreads);

VS_DEVICE int32_t bin_of(float depth) {
  return min(static_cast<int32_t>((bits(add(fmaxf(depth, 0.0f), 1.0f)) - 0x3f800000u) >> kDepthShift), kDepths - 1);
}

// A y that `wanted` of the values reach which each(take) gives; -FLT_MAX where they are fewer, or none is near.
template <class Each>
VS_DEVICE float reached_by(const Each& each, float scale, float y_max, int32_t wanted, CrossingShared& s) {
  auto* const bins = reinterpret_cast<uint32_t*>(s.bins);
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < kDepths; i += kThreads) bins[i] = 0;
  if (threadIdx.x == 0) s.bin = kDepths - 1;
  __syncthreads();
  each([&](float z) {
    if (!is_neg_inf(z)) atomicAdd(&bins[bin_of(add(y_max, -mul(z, scale)))], 1u);
  });
  __syncthreads();
  int32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kDepthsOfThread; ++i) mine += static_cast<int32_t>(bins[kDepthsOfThread * threadIdx.x + i]);
  int32_t up_to = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == 31) s.words[warp][0] = up_to;
  __syncthreads();
  up_to += __reduce_add_sync(kAllLanes, lane < warp ? static_cast<int32_t>(s.words[lane % kWarps][0]) : 0);
  if (up_to - mine < wanted && wanted <= up_to) {
    int32_t bin = kDepthsOfThread * threadIdx.x, reached = up_to - mine;
    while ((reached += static_cast<int32_t>(bins[bin])) < wanted) ++bin;
    s.bin = bin;
  }
  __syncthreads();
  const int32_t bin = s.bin;
  __syncthreads();
  if (bin == kDepths - 1) return -FLT_MAX;
  const float depth = add(from_bits(0x3f800000u + (static_cast<uint32_t>(bin + 1) << kDepthShift)), -1.0f);
  return add(add(y_max, -depth), -mul(add(fabsf(y_max), depth), 0x1p-21f));
}

// Maxima of tiles, four at a time; -inf past the last.
struct Maxima {
  const float* at;  // aligned to 16
  int32_t tiles;

  VS_DEVICE float4 four(int32_t tile) const {
    if (tile + 4 <= tiles) return *reinterpret_cast<const float4*>(at + tile);
    float4 v = make_float4(neg_inf(), neg_inf(), neg_inf(), neg_inf());
    if (tile < tiles) v.x = at[tile];
    if (tile + 1 < tiles) v.y = at[tile + 1];
    if (tile + 2 < tiles) v.z = at[tile + 2];
    return v;
  }

  // take(maximum, tile), by all threads
  template <class Take>
  VS_DEVICE void each(const Take& take) const {
    for (int32_t from = 4 * static_cast<int32_t>(threadIdx.x); from < tiles; from += 4 * kPiecesAtOnce * kThreads) {
      float4 v[kPiecesAtOnce];
#pragma unroll
      for (int i = 0; i < kPiecesAtOnce; ++i) v[i] = four(from + 4 * kThreads * i);
#pragma unroll
      for (int i = 0; i < kPiecesAtOnce; ++i) {
        const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) take(z[j], from + 4 * kThreads * i + j);
      }
    }
  }
};

// Each thread's largest first: the k-th of these is below the k-th of all, and few are left to be sorted into bins.
VS_DEVICE float bound_of_maxima(const Maxima& maxima, float scale, float y_max, int32_t wanted, CrossingShared& s) {
  float best = neg_inf();
  maxima.each([&](float z, int32_t) { best = fmaxf(best, z); });
  const float first = reached_by([&](const auto& take) { take(best); }, scale, y_max, wanted, s);
  return reached_by(
      [&](const auto& take) {
        if (mul(best, scale) >= first)
          maxima.each([&](float z, int32_t) {
            if (mul(z, scale) >= first) take(z);
          });
      },
      scale, y_max, wanted, s);
}

__global__ void __launch_bounds__(kThreads, 1)
    list_kernel(const __grid_constant__ SamplingStream call, int32_t wanted) {
  extern __shared__ __align__(128) int64_t list[];
  __shared__ CrossingShared s;
  __shared__ uint32_t tile_count;
  const SamplingRows& p = call.rows;
  const int64_t n = blockIdx.x;
  if (threadIdx.x == 0) s.count = 0, s.lowest = INT32_MAX, s.highest = INT32_MIN, tile_count = 0;
  ptx::grid_wait();
  ptx::grid_launch_next();
  const Partial uncut = record_load<false>(call.uncut + n, p.rows);
  const float scale = scale_of(p, n), y_max = uncut.y_max;
  if (!in_range(y_max) || is_nan(scale)) {
    if (threadIdx.x == 0) put_row(call, n, false, kKeepAll, {{kNoArrival, kNobody}}, 0.0f, nullptr);
    return;
  }
  const Columns columns(p, n);
  const Maxima maxima = {Workspace(call.workspace, p.rows).maxima(n), (columns.valid + kTile - 1) / kTile};
  const float low = bound_of_maxima(maxima, scale, y_max, wanted, s);
  auto* const tiles = reinterpret_cast<int32_t*>(s.bins);
  maxima.each([&](float z, int32_t tile) {
    if (!(mul(z, scale) >= low)) return;
    const uint32_t to = atomicAdd(&tile_count, 1u);
    if (to < kMostTiles) tiles[to] = tile;
  });
  __syncthreads();
  const auto some = static_cast<int32_t>(min(tile_count, static_cast<uint32_t>(kMostTiles)));
  for (int32_t i = threadIdx.x; i < 4 * some; i += kThreads) {
    const int32_t base = kTile * tiles[i / 4] + 4 * (i % 4);
    const float4 v = columns.four(base);
    const float z[4] = {v.x, v.y, v.z, v.w};
    uint32_t which = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) which |= mul(z[j], scale) >= low ? 1u << j : 0;
    if (which != 0) append(s.count, list, columns, base, which);
  }
  __syncthreads();
  const Bounds bounds = {y_max, low, FLT_MAX, exp_k(clamp_logit(y_max))};
  const uint32_t count = tile_count <= kMostTiles ? s.count : kListed + 1;
  finish_row<false>(call, n, bounds, count, list, list, 1, s);
}

// Of logits that came without.
__global__ void __launch_bounds__(kMaximaThreads)
    maxima_kernel(const __grid_constant__ SamplingStream call, int32_t part_columns, int32_t parts) {
  const SamplingRows& p = call.rows;
  const int64_t n = blockIdx.x / parts;
  const int32_t begin = static_cast<int32_t>(blockIdx.x % parts) * part_columns;
  ptx::grid_wait();
  ptx::grid_launch_next();
  const Columns columns(p, n);
  float* const to = Workspace(call.workspace, p.rows).maxima(n);
  const int32_t end = min(columns.valid, begin + part_columns);
  for (int32_t block = begin; block < end; block += 4 * kPieces * kMaximaThreads) {
    float most[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int32_t at = block + 4 * (kMaximaThreads * i + static_cast<int32_t>(threadIdx.x));
      most[i] = largest(columns.four(at < end ? at : columns.valid));
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int32_t at = block + 4 * (kMaximaThreads * i + static_cast<int32_t>(threadIdx.x));
      most[i] = fmaxf(most[i], __shfl_xor_sync(kAllLanes, most[i], 1));
      most[i] = fmaxf(most[i], __shfl_xor_sync(kAllLanes, most[i], 2));
      if (threadIdx.x % 4 == 0 && at < end) to[at / kTile] = most[i];
    }
  }
}

}  // namespace

void launch_maxima(const SamplingStream& call, cudaStream_t stream) {
  const Parts parts =
      parts_of(call.rows.rows, call.rows.valid, 4 * kPieces * kMaximaThreads, 8 * multiprocessor_count());
  launch_grid(maxima_kernel, call.rows.rows * parts.count, kMaximaThreads, 0, stream, call, parts.columns, parts.count);
}

void launch_list(const SamplingStream& call, cudaStream_t stream) {
  const SamplingStep* step = call.rows.step;
  while (step->kind == kMinP) ++step;
  const auto wanted = static_cast<int32_t>(step->number < call.rows.valid ? step->number : call.rows.valid);
  static OncePerDevice allowed;
  allowed([] {
    check(cudaFuncSetAttribute(list_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCollectBytes),
          "shared memory of the sampling kernel");
  });
  launch_grid(list_kernel, call.rows.rows, kThreads, kCollectBytes, stream, call, wanted);
}

}  // namespace vocabshard::sm90::sampling
