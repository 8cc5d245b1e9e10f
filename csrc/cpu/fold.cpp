#include <stdexcept>

#include "api.h"
#include "contract.h"
#include "cpu/threads.h"

namespace vocabshard {
namespace {

template <bool kEntropy>
void fold_row(const int64_t* gathered, int64_t world_size, int64_t words, int64_t rows, int64_t n, int target,
              bool invalid_is_nan, const FoldOutputs& out) {
  Partial merged = partial_identity();
  for (int64_t w = 0; w < world_size; ++w)
    partial_merge(merged, record_load<kEntropy>(gathered + w * words * rows + n, rows));
  partial_finish(merged);
  const Folded folded = fold_finish<kEntropy>(merged, target, invalid_is_nan);
  out.logp[n] = folded.logp;
  out.lse[n] = folded.lse;
  if (kEntropy) out.entropy[n] = folded.entropy;
  out.lse2_int[n] = folded.lse2_int;
  out.lse2_frac[n] = folded.lse2_frac;
  out.maximum[n] = merged.y_max;
}

}  // namespace

void cpu_reciprocals(const float* t, int64_t count, float* out) {
  const cpu::PlainFloat plain;
  for (int64_t i = 0; i < count; ++i) {
    const bool usable = t[i] > 0.0f && bits(t[i]) < 0x7f800000u;
    out[i] = usable ? static_cast<float>(1.0 / static_cast<double>(t[i])) : quiet_nan();
  }
}

void cpu_fold(const int64_t* gathered, int64_t world_size, int64_t words, int64_t rows, const int64_t* target_ids,
              int64_t ignore_index, int64_t real_vocab_size, bool invalid_is_nan, const FoldOutputs& out) {
  const bool entropy = words == kRecordWordsEntropy;
  if (!entropy && words != kRecordWords) throw std::invalid_argument("records must have 4 or 7 words");
  if (rows == 0) return;  // empty tensors have no address
  if (entropy != (out.entropy != nullptr))
    throw std::invalid_argument("entropy is folded from records of 7 words only");
  const cpu::PlainFloat plain;
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t id = target_ids[n];
    const int target = id == ignore_index                ? kTargetIgnored
                       : id >= 0 && id < real_vocab_size ? kTargetScored
                                                         : kTargetInvalid;
    if (entropy)
      fold_row<true>(gathered, world_size, words, rows, n, target, invalid_is_nan, out);
    else
      fold_row<false>(gathered, world_size, words, rows, n, target, invalid_is_nan, out);
  }
}

}  // namespace vocabshard
