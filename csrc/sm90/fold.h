// The fold of one row, by a thread or a warp: from a merged and finished partial to what FoldRows wants.
#pragma once

#include "contract.h"
#include "sm90/draw.h"
#include "sm90/launch.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

VS_DEVICE int target_of(const FoldRows& fold, int64_t id) {
  if (fold.has_ignore_index && id == fold.ignore_index) return kTargetIgnored;
  return id >= 0 && id < fold.real_vocab_size ? kTargetScored : kTargetInvalid;
}

template <bool kEntropy>
VS_DEVICE void store_folded(const FoldRows& fold, int64_t row, const Folded& folded, float y_max) {
  if (fold.logp != nullptr) fold.logp[row] = folded.logp;
  if (fold.lse != nullptr) fold.lse[row] = folded.lse;
  if (kEntropy && fold.entropy != nullptr) fold.entropy[row] = folded.entropy;
  if (fold.lse2_int != nullptr) fold.lse2_int[row] = folded.lse2_int;
  if (fold.lse2_frac != nullptr) fold.lse2_frac[row] = folded.lse2_frac;
  if (fold.maximum != nullptr) fold.maximum[row] = y_max;
}

template <bool kEntropy>
VS_DEVICE void fold_row(const FoldRows& fold, int64_t row, const Partial& p, int64_t id) {
  const Folded folded = fold_finish<kEntropy>(p, target_of(fold, id), fold.invalid_is_nan);
  store_folded<kEntropy>(fold, row, folded, p.y_max);
}

// The same by a warp, whose lanes all have the row: both logarithms at once, by odd lanes and by even ones.
VS_DEVICE void fold_row_by_warp(const FoldRows& fold, int64_t row, const Partial& p, int64_t id) {
  const FoldOf of = fold_of(p);
  const bool odd = threadIdx.x % 2 != 0;
  const Log2 mine = log2_split(odd ? of.ratio : of.sum);
  const Log2 other = {__shfl_xor_sync(~0u, mine.a, 1), __shfl_xor_sync(~0u, mine.l, 1)};
  const Log2 of_sum = {odd ? other.a : mine.a, odd ? other.l : mine.l};
  const Log2 of_ratio = {odd ? mine.a : other.a, odd ? mine.l : other.l};
  const Folded folded = fold_finish<false>(p, target_of(fold, id), fold.invalid_is_nan, of, of_sum, of_ratio);
  if (threadIdx.x % 32 == 0) store_folded<false>(fold, row, folded, p.y_max);
}

// The fold of a row with the token that it drew, and with no cut.
VS_DEVICE void fold_drawn(const FoldRows& fold, const DrawnRows& drawn, int64_t row, Partial& p, const Winner& w) {
  const int64_t token = drawn_token(p, w);
  drawn.tokens[row] = token;
  drawn.cut[row] = kKeepAll;
  fold_row<false>(fold, row, p, token);
}

}  // namespace vocabshard::sm90
