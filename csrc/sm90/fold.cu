// [ranks, words, rows] records, merged in ascending order of ranks, to the results of a row: a thread a row.
#include <stdexcept>
#include <string>

#include "contract.h"
#include "sm90/check.h"
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

  const int64_t id = call.target_ids[row];
  const int target = call.has_ignore_index && id == call.ignore_index ? kTargetIgnored
                     : id >= 0 && id < call.real_vocab_size           ? kTargetScored
                                                                      : kTargetInvalid;
  const Folded folded = fold_finish<kEntropy>(p, target, call.invalid_is_nan);
  call.logp[row] = folded.logp;
  call.lse[row] = folded.lse;
  if (kEntropy) call.entropy_out[row] = folded.entropy;
  call.lse2_int[row] = folded.lse2_int;
  call.lse2_frac[row] = folded.lse2_frac;
  call.maximum[row] = p.y_max;
}

}  // namespace

void launch_fold(const FoldCall& call, cudaStream_t stream) {
  if (call.rows == 0) return;
  const int64_t blocks = (call.rows + kThreads - 1) / kThreads;
  launch_behind(call.entropy ? fold<true> : fold<false>, blocks, kThreads, stream, call);
}

}  // namespace vocabshard::sm90
