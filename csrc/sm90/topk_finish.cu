// The n best columns of all ranks, their log-probs and the target's, its rank: a warp a row.
#include "contract.h"
#include "sampling.h"
#include "sm90/check.h"
#include "sm90/fold.h"
#include "sm90/ptx.h"
#include "sm90/topk.h"

namespace vocabshard::sm90 {

namespace {

constexpr int kThreads = 128;

template <bool kEntropy>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ TopkFinish p) {
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  ptx::grid_wait();
  if (row >= p.rows) return;
  constexpr int kWords = kEntropy ? kRecordWordsEntropy : kRecordWords;
  Partial merged = partial_identity();
  for (int64_t part = 0; part < p.parts; ++part)
    partial_merge(merged, record_load<kEntropy>(p.records + part * kWords * p.rows + row, p.rows));
  if (lane == 31) {
    Partial own = merged;
    partial_finish(own);
    const int64_t target = p.target_ids[row];
    fold_row<kEntropy>(p.fold, row, own, target);
    p.rank[row] = target >= 0 && target < p.fold.real_vocab_size ? p.before[row] + 1 : 0;
  }
  const float scale = p.scales != nullptr ? p.scales[row] : p.scale;
  const int64_t cut = p.cut != nullptr ? p.cut[row] : kKeepAll;
  int64_t* const ids = p.ids + row * p.n;
  float* const logp = p.logp + row * p.n;
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
    if (at >= p.n) continue;
    Partial one = merged;
    one.y_target = place >= cut ? mul(logit_of(static_cast<int32_t>(place >> 32)), scale) : neg_inf();
    partial_finish(one);
    ids[at] = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place));
    logp[at] = fold_finish<false>(one, kTargetScored, true).logp;
  }
  some = __reduce_add_sync(~0u, some);
  for (int32_t i = some + lane; i < p.n; i += 32) {
    ids[i] = -1;
    logp[i] = neg_inf();
  }
}

}  // namespace

void launch_topk_finish(const TopkFinish& call, cudaStream_t stream) {
  if (call.rows == 0) return;
  const int64_t blocks = (call.rows * 32 + kThreads - 1) / kThreads;
  launch_behind(call.entropy ? finish_kernel<true> : finish_kernel<false>, blocks, kThreads, stream, call);
}

}  // namespace vocabshard::sm90
