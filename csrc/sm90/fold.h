// The fold of one row by a thread: from a merged and finished partial to what FoldRows wants.
#pragma once

#include "contract.h"
#include "sm90/draw.h"
#include "sm90/launch.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

template <bool kEntropy>
VS_DEVICE void fold_row(const FoldRows& fold, int64_t row, const Partial& p, int64_t id) {
  const int target = fold.has_ignore_index && id == fold.ignore_index ? kTargetIgnored
                     : id >= 0 && id < fold.real_vocab_size           ? kTargetScored
                                                                      : kTargetInvalid;
  const Folded folded = fold_finish<kEntropy>(p, target, fold.invalid_is_nan);
  if (fold.logp != nullptr) fold.logp[row] = folded.logp;
  if (fold.lse != nullptr) fold.lse[row] = folded.lse;
  if (kEntropy && fold.entropy != nullptr) fold.entropy[row] = folded.entropy;
  if (fold.lse2_int != nullptr) fold.lse2_int[row] = folded.lse2_int;
  if (fold.lse2_frac != nullptr) fold.lse2_frac[row] = folded.lse2_frac;
  if (fold.maximum != nullptr) fold.maximum[row] = p.y_max;
}

// The fold of a row with the token that it drew, and with no cut.
VS_DEVICE void fold_drawn(const FoldRows& fold, const DrawnRows& drawn, int64_t row, Partial& p, const Winner& w) {
  const int64_t token = drawn_token(p, w);
  drawn.tokens[row] = token;
  drawn.cut[row] = kKeepAll;
  fold_row<false>(fold, row, p, token);
}

}  // namespace vocabshard::sm90
