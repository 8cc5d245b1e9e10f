// From a row's merged record and the places of its best columns to their log-probs, and to what is wanted of its
// target.
#pragma once

#include "contract.h"
#include "sampling.h"
#include "sm90/fold.h"
#include "sm90/ptx.h"
#include "sm90/topk.h"

namespace vocabshard::sm90 {

template <bool kEntropy>
VS_DEVICE Partial merged_record(const TopkFinish& p, int64_t row) {
  constexpr int kWords = kEntropy ? kRecordWordsEntropy : kRecordWords;
  Partial merged = partial_identity();
  for (int64_t part = 0; part < p.parts; ++part)
    partial_merge(merged, record_load<kEntropy>(p.records + part * kWords * p.rows + row, p.rows));
  return merged;
}

template <bool kEntropy>
VS_DEVICE void score_target(const TopkFinish& p, int64_t row, Partial merged) {
  partial_finish(merged);
  fold_row<kEntropy>(p.fold, row, merged, p.target_ids[row]);
}

VS_DEVICE void store_rank(const TopkFinish& p, int64_t row, int64_t before) {
  const int64_t target = p.target_ids[row];
  p.rank[row] = target >= 0 && target < p.fold.real_vocab_size ? before + 1 : 0;
}

// The column that comes `at`-th of the row's best; -2^63: there is none.
VS_DEVICE void score_place(const TopkFinish& p, int64_t row, Partial merged, int32_t at, int64_t place) {
  int64_t id = -1;
  float logp = neg_inf();
  if (place != kKeepAll) {
    const int64_t cut = p.cut != nullptr ? p.cut[row] : kKeepAll;
    const float scale = p.scales != nullptr ? p.scales[row] : p.scale;
    merged.y_target = place >= cut ? mul(logit_of(static_cast<int32_t>(place >> 32)), scale) : neg_inf();
    partial_finish(merged);
    id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place));
    logp = fold_finish<false>(merged, kTargetScored, true).logp;
  }
  p.ids[row * p.n + at] = id;
  p.logp[row * p.n + at] = logp;
}

}  // namespace vocabshard::sm90
