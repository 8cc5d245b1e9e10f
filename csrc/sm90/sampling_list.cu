// Rows of which a top_k keeps few columns (sampling_stream.h): a cluster of CTAs a row lists the best of them in the
// shared memory of its first CTA, which does all the rest.
#include <cooperative_groups.h>

#include <cfloat>

#include "sm90/launch.h"
#include "sm90/sampling_finish.cuh"
#include "sm90/sampling_grids.h"

namespace vocabshard::sm90::sampling {

namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = kCollectThreads, kWarps = kThreads / 32, kMostCluster = 16;
constexpr int kDepths = 2048, kDepthShift = 16;  // bins of depth d = y_max - y, by the bits of d + 1: 128 an octave
constexpr int kDepthsOfThread = kDepths / kThreads;
constexpr int kSampled = 4096;  // columns, about, of which a bound is learnt
constexpr int kMostStride = 32;
static_assert(sizeof(uint32_t) * kDepths <= sizeof(CrossingShared::bins));

VS_DEVICE int32_t bin_of(float depth) {
  return min(static_cast<int32_t>((bits(add(fmaxf(depth, 0.0f), 1.0f)) - 0x3f800000u) >> kDepthShift), kDepths - 1);
}

// A y that `wanted` columns of a sample reach; -FLT_MAX where they are fewer.
VS_DEVICE float bound_of_sample(const Columns& columns, float scale, float y_max, int32_t stride, int32_t wanted,
                                CrossingShared& s) {
  auto* const bins = reinterpret_cast<uint32_t*>(s.bins);
  const int32_t strata = (columns.valid + 8 * stride - 1) / (8 * stride), pieces = 2 * strata;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int32_t base = threadIdx.x; base < pieces; base += kPieces * kThreads) {
    float4 v[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int32_t piece = base + kThreads * i, stratum = piece / 2;
      const auto jitter = static_cast<int32_t>((static_cast<uint32_t>(stratum) * 0x9e3779b1u) >> 20) & (stride - 1);
      v[i] = columns.four(piece < pieces ? 8 * (stratum * stride + jitter) + 4 * (piece & 1) : columns.valid);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (!is_neg_inf(z[j])) atomicAdd(&bins[bin_of(add(y_max, -mul(z[j], scale)))], 1u);
    }
  }
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
  if (s.bin < 0 || s.bin == kDepths - 1) return -FLT_MAX;
  const float depth = add(from_bits(0x3f800000u + (static_cast<uint32_t>(s.bin + 1) << kDepthShift)), -1.0f);
  return add(add(y_max, -depth), -mul(add(fabsf(y_max), depth), 0x1p-21f));
}

__global__ void __launch_bounds__(kThreads, 2)
    list_kernel(const __grid_constant__ SamplingStream call, int32_t part_columns, int32_t stride, int32_t wanted) {
  extern __shared__ __align__(128) int64_t list[];
  __shared__ CrossingShared s;
  const SamplingRows& p = call.rows;
  const cg::cluster_group cluster = cg::this_cluster();
  const auto rank = static_cast<int32_t>(cluster.block_rank()), ranks = static_cast<int32_t>(cluster.num_blocks());
  const int64_t n = blockIdx.x / static_cast<uint32_t>(ranks);
  if (threadIdx.x == 0) s.count = 0, s.lowest = INT32_MAX, s.highest = INT32_MIN, s.bin = -1;
  for (int i = threadIdx.x; i < kDepths; i += kThreads) reinterpret_cast<uint32_t*>(s.bins)[i] = 0;
  __syncthreads();
  ptx::grid_wait();
  ptx::grid_launch_next();
  const Partial uncut = record_load<false>(call.uncut + n, p.rows);
  const float scale = scale_of(p, n), y_max = uncut.y_max;
  if (!in_range(y_max) || is_nan(scale)) {
    if (rank == 0 && threadIdx.x == 0) put_row(call, n, false, kKeepAll, {{kNoArrival, kNobody}}, 0.0f, nullptr);
    return;
  }
  const Columns columns(p, n);
  const float low = bound_of_sample(columns, scale, y_max, stride, wanted, s);
  const int32_t begin = rank * part_columns, end = min(columns.valid, begin + part_columns);
  for (int32_t block = begin; block < end; block += 4 * kPieces * kThreads) {
    const int32_t base = block + 4 * static_cast<int32_t>(threadIdx.x);
    float4 v[kPieces];
    if (block + 4 * kPieces * kThreads <= end) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) v[i] = *reinterpret_cast<const float4*>(columns.row + base + 4 * kThreads * i);
    } else {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int32_t at = base + 4 * kThreads * i;
        v[i] = columns.four(at < end ? at : columns.valid);
      }
    }
    const float best = fmaxf(fmaxf(largest(v[0]), largest(v[1])), fmaxf(largest(v[2]), largest(v[3])));
    if (!(mul(best, scale) >= low)) continue;
    uint32_t which = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) which |= mul(z[j], scale) >= low ? 1u << (4 * i + j) : 0;
    }
    append(s.count, list, columns, base, which);
  }
  // the first CTA's list goes on with the others' candidates; it has begun, as it counts from 0 before grid_wait
  cluster.sync();
  if (rank != 0) {
    const uint32_t mine = s.count;
    __syncthreads();
    if (threadIdx.x == 0 && mine > 0) s.few_count = atomicAdd(cluster.map_shared_rank(&s.count, 0), mine);
    __syncthreads();
    int64_t* const first = cluster.map_shared_rank(list, 0);
    for (uint32_t i = threadIdx.x; i < min(mine, static_cast<uint32_t>(kListed)); i += kThreads)
      if (s.few_count + i < kListed) first[s.few_count + i] = list[i];
  }
  cluster.sync();
  if (rank != 0) return;
  const Bounds bounds = {y_max, low, FLT_MAX, exp_k(clamp_logit(y_max))};
  finish_row<false>(call, n, bounds, s.count, list, list, ranks, s);
}

}  // namespace

void launch_list(const SamplingStream& call, cudaStream_t stream) {
  const SamplingRows& p = call.rows;
  const SamplingStep* step = p.step;
  while (step->kind == kMinP) ++step;
  int32_t stride = 1;
  while (stride < kMostStride && p.valid > int64_t{kSampled} * stride) stride *= 2;
  const double expected = static_cast<double>(step->number < p.valid ? step->number : p.valid) / stride;
  const double wanted = stride == 1 ? expected : expected + 4.0 * sqrt(expected) + 6.0;
  int32_t cluster = 1;
  while (cluster < kMostCluster && 2 * cluster * p.rows <= 2 * multiprocessor_count() && 2048 * cluster < p.valid)
    cluster *= 2;
  const int64_t granules = (p.valid + 4 * kThreads - 1) / (4 * kThreads);
  const auto part_columns = static_cast<int32_t>((granules + cluster - 1) / cluster * 4 * kThreads);

  static OncePerDevice allowed;
  allowed([] {
    check(cudaFuncSetAttribute(list_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCollectBytes),
          "shared memory of the sampling kernel");
    check(cudaFuncSetAttribute(list_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "cluster of the sampling kernel");
  });
  launch_grid_of_clusters(list_kernel, p.rows * cluster, kThreads, kCollectBytes, cluster, stream, call, part_columns,
                          stride, static_cast<int32_t>(ceil(wanted)));
}

}  // namespace vocabshard::sm90::sampling
