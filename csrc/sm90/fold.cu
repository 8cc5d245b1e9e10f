// [ranks, words, rows] records, merged in ascending order of ranks, to the results of a row: a thread a row.
#include "contract.h"
#include "sm90/check.h"
#include "sm90/fold.h"
#include "sm90/launch.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

namespace {

constexpr int kThreads = 128;

template <bool kEntropy>
__global__ void __launch_bounds__(kThreads) fold(const FoldCall call) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  ptx::grid_wait();
  if (row >= call.rows) return;
  constexpr int kWords = kEntropy ? kRecordWordsEntropy : kRecordWords;
  Partial p = partial_identity();
  for (int64_t rank = 0; rank < call.ranks; ++rank)
    partial_merge(p, record_load<kEntropy>(call.records + rank * kWords * call.rows + row, call.rows));
  partial_finish(p);
  fold_row<kEntropy>(call.fold, row, p, call.target_ids[row]);
}

__global__ void __launch_bounds__(kThreads) fold_draws(const FoldCall call, const DrawnRows drawn) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  ptx::grid_wait();
  if (row >= call.rows) return;
  Partial p = partial_identity();
  Winner first = nobody();
  for (int64_t rank = 0; rank < call.ranks; ++rank) {
    const int64_t* of_rank = call.records + rank * (kRecordWords + kWinnerWords) * call.rows + row;
    partial_merge(p, record_load<false>(of_rank, call.rows));
    first = earlier(first, winner_load(of_rank + kRecordWords * call.rows, call.rows));
  }
  partial_finish(p);
  fold_drawn(call.fold, drawn, row, p, first);
}

}  // namespace

void launch_fold_drawn(const FoldCall& call, const DrawnRows& drawn, cudaStream_t stream) {
  if (call.rows == 0) return;
  launch_behind(fold_draws, (call.rows + kThreads - 1) / kThreads, kThreads, stream, call, drawn);
}

void launch_fold(const FoldCall& call, cudaStream_t stream) {
  if (call.rows == 0) return;
  const int64_t blocks = (call.rows + kThreads - 1) / kThreads;
  launch_behind(call.entropy ? fold<true> : fold<false>, blocks, kThreads, stream, call);
}

}  // namespace vocabshard::sm90
