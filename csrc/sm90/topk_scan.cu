// The best columns of rows of logits, and how many are better than the target: a cluster of CTAs a row.
//
// The n-th best of the threads' own best columns bounds the n-th best of all from below, and exactly n threads have a
// column that reaches it: theirs alone are looked at again, and few of them are listed.
#include <cooperative_groups.h>

#include <algorithm>
#include <stdexcept>

#include "sampling.h"
#include "sm90/check.h"
#include "sm90/launch.h"
#include "sm90/ptx.h"
#include "sm90/topk.h"
#include "sm90/topk_score.cuh"
#include "sm90/topk_sort.cuh"

namespace vocabshard::sm90 {

namespace {

namespace cg = cooperative_groups;

constexpr int kMostCtas = 8;
constexpr int kFewThreads = 128, kManyThreads = 512;
constexpr int kInFlight = 4;              // chunks of four columns a thread
constexpr int64_t kMostList = 27 * 1024;  // places in shared memory

template <int kThreads>
struct Scan {
  Bound<kThreads> bound;
  TopSort<kThreads> sort;
  Partial record;
  int64_t target;
  int32_t count;
  unsigned long long before;
};

// Four columns from `first` on; those that do not exist are -inf.
VS_DEVICE float4 load_four(const float* row, int32_t first, int32_t columns, bool aligned) {
  if (aligned && first + 4 <= columns) return *reinterpret_cast<const float4*>(row + first);
  float4 v = make_float4(neg_inf(), neg_inf(), neg_inf(), neg_inf());
  if (first < columns) v.x = row[first];
  if (first + 1 < columns) v.y = row[first + 1];
  if (first + 2 < columns) v.z = row[first + 2];
  if (first + 3 < columns) v.w = row[first + 3];
  return v;
}

// kFinishes: the results at once.
template <int kThreads, bool kFinishes>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    scan_kernel(const __grid_constant__ TopkScan p, int32_t slice, int32_t of_thread) {
  extern __shared__ __align__(16) int64_t list[];
  __shared__ Scan<kThreads> s;
  constexpr int kTogether = Bound<kThreads>::kTogether;
  const cg::cluster_group cluster = cg::this_cluster();
  const uint32_t rank = cluster.block_rank(), ranks = cluster.num_blocks();
  const int64_t n = blockIdx.x / ranks, first = int64_t{slice} * rank;
  const auto columns = static_cast<int32_t>(max(int64_t{0}, min(p.valid - first, int64_t{slice})));
  const int32_t chunks = (columns + 3) / 4;
  const float* const row = p.logits + n * p.row_stride + first;
  const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
  const int64_t first_id = p.vocab_start + first;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  ptx::grid_launch_next();
  ptx::grid_wait();
  float4 v[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) v[i] = load_four(row, 4 * (thread + i * kThreads), columns, aligned);
  if (thread == 0) {
    int64_t place = kKeepAll;
    if (p.place != nullptr) {
      place = p.place[n];
    } else if (p.target_ids != nullptr) {
      const int64_t id = p.target_ids[n], local = id - p.vocab_start;
      if (local >= 0 && local < p.valid) place = place_of(p.logits[n * p.row_stride + local], id);
    }
    s.target = place;
    s.count = 0;
    s.before = 0;
  }
  if (kFinishes && rank == 0 && thread == kThreads - 1)
    s.record = p.finish.entropy ? merged_record<true>(p.finish, n) : merged_record<false>(p.finish, n);
  __syncthreads();

  const bool counts = s.target != kKeepAll;
  const auto target_order = static_cast<int32_t>(s.target >> 32);
  // of equals the columns before this one are better
  const int64_t target_column =
      counts ? kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(s.target)) - first_id : 0;
  const auto tie = static_cast<int32_t>(min(max(target_column, int64_t{0}), int64_t{columns}));
  int32_t best_order = INT32_MIN, best_column = -1, before = 0;
  for (int32_t base = thread; base < chunks; base += kInFlight * kThreads) {
    float4 ahead[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      ahead[i] = load_four(row, 4 * (base + (kInFlight + i) * kThreads), columns, aligned);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t column = 4 * (base + i * kThreads) + j, order = order_of(z[j]);
        if (column >= columns) continue;
        if (order > best_order) best_order = order, best_column = column;  // the first of equals
        before += order > target_order || (order == target_order && column < tie);
      }
      v[i] = ahead[i];
    }
  }
  before = __reduce_add_sync(~0u, before);
  if (thread % 32 == 0 && before != 0) atomicAdd(&s.before, static_cast<unsigned long long>(before));
  s.bound.find(best_column < 0 ? kKeepAll : place_of(logit_of(best_order), first_id + best_column), p.n);
  // again the columns of the groups that reach the bound
  const int32_t groups = min(p.n, (min(kThreads, chunks) + kTogether - 1) / kTogether),
                of_group = kTogether * of_thread;
  for (int32_t i = thread; i < groups * of_group; i += kThreads) {
    const int32_t at = i % of_group, member = at % kTogether;
    const int32_t chunk = s.bound.hot[i / of_group] * kTogether + member + kThreads * (at / kTogether);
    const float4 x = load_four(row, 4 * chunk, columns, aligned);
    const float z[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t place = place_of(z[j], first_id + 4 * chunk + j);
      if (4 * chunk + j < columns && place >= s.bound.bound) list[atomicAdd(&s.count, 1)] = place;
    }
  }
  __syncthreads();
  sort_best(s.sort, s.bound, list, s.count, p.n);
  if (ranks > 1) {
    cluster.sync();
    if (rank == 0) {
      const int32_t all = static_cast<int32_t>(ranks) * p.n;
      for (int32_t i = thread; i < all; i += kThreads)
        list[i] = cluster.map_shared_rank(s.sort.sorted, i / p.n)[i % p.n];
      if (thread > 0 && thread < static_cast<int32_t>(ranks))
        atomicAdd(&s.before, *cluster.map_shared_rank(&s.before, thread));
    }
    cluster.sync();  // a CTA's memory has to stay while another reads it
    if (rank != 0) return;
    sort_best(s.sort, s.bound, list, static_cast<int32_t>(ranks) * p.n, p.n);
  }
  const auto total = counts ? static_cast<int64_t>(s.before) : 0;
  if constexpr (kFinishes) {
    if (thread < p.n) score_place(p.finish, n, s.record, thread, s.sort.sorted[thread]);
    if (thread == kThreads - 1) {
      store_rank(p.finish, n, total);
      p.finish.entropy ? score_target<true>(p.finish, n, s.record) : score_target<false>(p.finish, n, s.record);
    }
  } else {
    if (thread < p.n) p.best[n * p.n + thread] = s.sort.sorted[thread];
    if (thread == 0) p.before[n] = total;
  }
}

struct Shape {
  int threads, ctas;
  int32_t slice, of_thread;
  int64_t list;
};

Shape shape_of(int64_t valid, int32_t n, int ctas, int threads) {
  // slices begin at multiples of 16 bytes, where rows do
  const int64_t slice = std::max<int64_t>(4, ((valid + ctas - 1) / ctas + 3) / 4 * 4);
  const int64_t of_thread = (slice / 4 + threads - 1) / threads;
  return {threads, ctas, static_cast<int32_t>(slice), static_cast<int32_t>(of_thread),
          std::max<int64_t>(4 * n * of_thread * (threads / kTopGroups), int64_t{n} * ctas)};
}

Shape choose_shape(int64_t rows, int64_t valid, int32_t n) {
  const int many = multiprocessor_count();
  int ctas = 1;
  while (ctas < kMostCtas && ctas * rows <= many && valid / ctas > 4096) ctas *= 2;  // two a multiprocessor
  Shape shape = shape_of(valid, n, ctas, rows * ctas >= 8 * many && valid / ctas <= 16384 ? kFewThreads : kManyThreads);
  while (shape.list > kMostList && shape.ctas < kMostCtas) shape = shape_of(valid, n, 2 * shape.ctas, kManyThreads);
  return shape;
}

template <int kThreads, bool kFinishes>
void launch(const TopkScan& call, const Shape& shape, cudaStream_t stream) {
  const auto kernel = scan_kernel<kThreads, kFinishes>;
  static OncePerDevice allowed;
  allowed([kernel] {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 8 * kMostList),
          "shared memory of the best columns");
  });
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(shape.ctas), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(call.rows * shape.ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(8 * shape.list);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, kernel, call, shape.slice, shape.of_thread), "best columns");
}

}  // namespace

bool topk_scan_fits(int64_t valid, int32_t n) {
  return n >= 1 && n <= kMostTop && valid < (int64_t{1} << 31) - 4096 &&
         shape_of(valid, n, kMostCtas, kManyThreads).list <= kMostList;
}

void launch_topk_scan(const TopkScan& call, cudaStream_t stream) {
  if (!topk_scan_fits(call.valid, call.n)) throw std::invalid_argument("topk: more columns than a launch can rank");
  if (call.rows == 0) return;
  const Shape shape = choose_shape(call.rows, call.valid, call.n);
  if (shape.threads == kFewThreads)
    call.finishes ? launch<kFewThreads, true>(call, shape, stream) : launch<kFewThreads, false>(call, shape, stream);
  else
    call.finishes ? launch<kManyThreads, true>(call, shape, stream) : launch<kManyThreads, false>(call, shape, stream);
}

}  // namespace vocabshard::sm90
