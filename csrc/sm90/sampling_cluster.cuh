// A row of logits in the shared memory of a cluster of CTAs, and reductions over it. What crosses are integers.
#pragma once

#include <cooperative_groups.h>

#include "sm90/sampling_words.cuh"

namespace vocabshard::sm90::sampling {

namespace cg = cooperative_groups;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMostCluster = 16;
constexpr int kMostWords = 3;  // that are reduced together

struct Totals {
  int64_t count, mass;
};

struct Found {
  int32_t bin;
  int64_t above, count, mass;  // before it, and in it
};

constexpr int kEntries = 1024;  // of a histogram, replicas and all
constexpr int kBins = 256;      // of the widest one
constexpr int kFew = 64;        // so many columns are sorted instead

struct Shared {
  Bin bins[2][kBins];  // in turn: other CTAs may still read the level before
  Bin replicas[kEntries];
  Totals halves[kBins];
  int64_t inbox[2][kMostCluster][kMostWords];
  int64_t of_warp[kWarps][kMostWords];
  Found found;
  int64_t few[kFew], all[kFew], all_mass[kFew];
  uint32_t few_count, all_count;
  uint32_t range[2];
  int64_t answer;
  alignas(8) uint64_t arrived;
};

// A CTA's part of one row, 4 columns a chunk. Columns past the row's end are -inf.
struct Slice {
  const float4* z;
  int32_t chunks;
  int32_t columns;   // that exist
  int64_t first_id;  // global
  Shared* shared;
  uint32_t rank, ranks;
  uint32_t exchanges, levels;  // so far

  VS_DEVICE float column(int32_t i) const { return reinterpret_cast<const float*>(z)[i]; }
};

template <class T>
VS_DEVICE T* of_rank(T* mine, uint32_t rank) {
  return cg::this_cluster().map_shared_rank(mine, rank);
}

VS_DEVICE void cluster_sync() { cg::this_cluster().sync(); }

// `mine` of all threads of the cluster in one, known to all. op(a, b) is of integers and has no order.
template <int K, class Op>
VS_DEVICE Words<K> over_cluster(Slice& slice, Words<K> mine, const Words<K>& identity, const Op& op) {
  Shared& s = *slice.shared;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) mine = op(mine, of_lane(mine, step));
  if (lane == 0)
    for (int k = 0; k < K; ++k) s.of_warp[warp][k] = mine.x[k];
  __syncthreads();
  // the next exchange may begin while another CTA still reads this one
  int64_t (*const inbox)[kMostWords] = s.inbox[slice.exchanges++ % 2];
  if (warp == 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) mine.x[k] = s.of_warp[lane % kWarps][k];
#pragma unroll
    for (int step = kWarps / 2; step > 0; step /= 2) mine = op(mine, of_lane(mine, step));
    if (lane < slice.ranks)
      for (int k = 0; k < K; ++k) *of_rank(&inbox[slice.rank][k], lane) = mine.x[k];
  }
  cluster_sync();
#pragma unroll
  for (int k = 0; k < K; ++k) mine.x[k] = lane < slice.ranks ? inbox[lane % kMostCluster][k] : identity.x[k];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) mine = op(mine, of_lane(mine, step));
  return mine;
}

// This CTA's part of `row`, from column `first` on, into shared memory; by the copy engine where its address allows.
VS_DEVICE void load_slice(Slice& slice, float* to, const float* from) {
  Shared& s = *slice.shared;
  const int32_t whole = reinterpret_cast<uintptr_t>(from) % 16 == 0 ? slice.columns / 4 * 4 : 0;
  const uint32_t barrier = ptx::shared_address(&s.arrived);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_expect(barrier, static_cast<uint32_t>(whole) * 4);
    if (whole > 0)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       ptx::shared_address(to)),
                   "l"(from), "r"(whole * 4), "r"(barrier)
                   : "memory");
  }
  for (int32_t i = whole + threadIdx.x; i < 4 * slice.chunks; i += kThreads)
    to[i] = i < slice.columns ? from[i] : neg_inf();
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);
}

// The row's best place, INT64_MAX where it holds a NaN, INT64_MIN where it has no column.
VS_DEVICE int64_t best_place(Slice& slice) {
  float best = neg_inf();
  int32_t at = 0;
  bool nan = false;
  for (int32_t i = threadIdx.x; i < slice.chunks; i += kThreads) {
    const float4 v = slice.z[i];
    const float most = ptx::max_nan(ptx::max_nan(v.x, v.y), ptx::max_nan(v.z, v.w));
    nan |= most != most;
    if (most > best) best = most, at = i;
  }
  if (is_neg_inf(best)) at = static_cast<int32_t>(threadIdx.x);  // the first of equals, and there is one
  Words<1> place = {{kKeepAll}};
  if (nan) {
    place.x[0] = INT64_MAX;
  } else if (4 * at < slice.columns) {
    int32_t j = 0;
    while (j < 3 && slice.column(4 * at + j) != best) ++j;
    place.x[0] = place_of(best, slice.first_id + 4 * at + j);
  }
  return over_cluster(slice, place, {{kKeepAll}}, Larger()).x[0];
}

}  // namespace vocabshard::sm90::sampling
