// A truncation on what a lane has of a row, in two instructions a column: the select of the gradient of the logits. The
// same text runs in a host test, against is_cut.
#pragma once

#include "contract.h"
#include "sampling.h"

namespace vocabshard::sm90 {

// A row's cut, as a lane sees it that has 16 columns of each group of 64.
struct LaneCut {
  float logit, above;  // above: the next float, so that z < above is z <= logit
  int32_t tie;         // of equals of `logit` those up to this column, counted from the lane's first, stay
};

VS_HD LaneCut lane_cut(int64_t cut, int64_t first_id) {
  const float logit = cut_logit(cut);
  const auto next = static_cast<uint32_t>(order_of(logit)) + 1u;
  const int64_t tie = cut_tie(cut) - first_id, most = 1 << 30;
  return {logit, logit_of(static_cast<int32_t>(next)), static_cast<int32_t>(tie < 0 ? -1 : tie < most ? tie : most)};
}

// Columns beyond the cut become -inf; before temperature, NaN stays. at(a, j): the lane's column j of group a. Whether
// equals stay is one answer for all it has of a group, but where the last that does is among them: looked at once more.
template <int kGroups, class At>
VS_HD void leave_out(const LaneCut& cut, const At& at) {
  const bool finite = cut.logit < -neg_inf();  // nothing is above infinity
#pragma unroll
  for (int a = 0; a < kGroups; ++a) {
    const float limit = finite && cut.tie < 64 * a ? cut.above : cut.logit;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float& z = at(a, j);
      z = z < limit ? neg_inf() : z;
    }
  }
  if (cut.tie < 0 ? finite : cut.tie >= 64 * (kGroups - 1) + 15) return;
#pragma unroll
  for (int a = 0; a < kGroups; ++a)
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float& z = at(a, j);
      z = z == cut.logit && 64 * a + j > cut.tie ? neg_inf() : z;
    }
}

}  // namespace vocabshard::sm90
