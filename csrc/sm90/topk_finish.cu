// The n best columns of all ranks, their log-probs and the target's, its rank: a warp a row.
#include "sm90/check.h"
#include "sm90/topk.h"
#include "sm90/topk_score.cuh"

namespace vocabshard::sm90 {

namespace {

constexpr int kThreads = 128;

template <bool kEntropy>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ TopkFinish p) {
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  ptx::grid_wait();
  if (row >= p.rows) return;
  const Partial merged = merged_record<kEntropy>(p, row);
  if (lane == 31) {
    score_target<kEntropy>(p, row, merged);
    store_rank(p, row, p.before[row]);
  }
  const auto all = static_cast<int32_t>(p.ranks * p.n);
  int32_t some = 0;
  for (int32_t i = lane; i < all; i += 32) {
    const int64_t place = p.best[(i / p.n * p.rows + row) * p.n + i % p.n];
    if (place == kKeepAll) continue;
    ++some;
    int32_t at = i;
    if (p.ranks > 1) {
      at = 0;
      for (int32_t j = 0; j < all; ++j) at += p.best[(j / p.n * p.rows + row) * p.n + j % p.n] > place;
    }
    if (at < p.n) score_place(p, row, merged, at, place);
  }
  some = __reduce_add_sync(~0u, some);
  for (int32_t i = some + lane; i < p.n; i += 32) score_place(p, row, merged, i, kKeepAll);
}

}  // namespace

void launch_topk_finish(const TopkFinish& call, cudaStream_t stream) {
  if (call.rows == 0) return;
  const int64_t blocks = (call.rows * 32 + kThreads - 1) / kThreads;
  launch_behind(call.entropy ? finish_kernel<true> : finish_kernel<false>, blocks, kThreads, stream, call);
}

}  // namespace vocabshard::sm90
