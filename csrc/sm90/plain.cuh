// From logits in shared memory to partials, by contract.h's own functions: the kernels for what TMA cannot address, and
// for fp32. A thread keeps the partial of one row over all tiles it is given.
#pragma once

#include "contract.h"
#include "sampling.h"
#include "sm90/epilogue.h"
#include "sm90/params.h"

namespace vocabshard::sm90 {

struct PlainParams {
  const void* hidden;
  const void* weight;
  int64_t hidden_row, hidden_column, weight_row, weight_column;  // strides in elements
  int64_t depth;
  RowWork work;
  int64_t* splits;  // [gridDim.y * 2][record words][rows]: one record a split and half
};

struct PlainRow {
  int32_t row;
  float scale;
  int64_t target;  // local column, or -1
  int64_t cut;
};

VS_DEVICE PlainRow plain_row(const RowWork& work, int32_t row) {
  PlainRow r = {row, work.inv_temperature, -1, kKeepAll};
  if (row >= work.rows) return r;
  if (work.row_inv_temperature != nullptr) r.scale = work.row_inv_temperature[row];
  if (work.cut != nullptr) r.cut = work.cut[row];
  const int64_t target = work.target_ids[row] - work.vocab_start;
  if (target >= 0 && target < work.valid) r.target = target;
  return r;
}

// One tile of 16 columns from `column` on; z: its chains.
template <bool kEntropy>
VS_DEVICE void plain_add_tile(Partial& partial, const PlainRow& r, const float* z, int64_t column,
                              const RowWork& work) {
  float y[kTile];
#pragma unroll
  for (int j = 0; j < kTile; ++j) {
    const int64_t v = column + j;
    float x = z[j];
    if (v < work.columns) {
      if (work.bias_type != kBiasNone) x = add(x, load_bias(work.bias, work.bias_type, v));
      if (work.cap != 0.0f) x = softcap(x, work.cap);
      if (work.logits != nullptr && r.row < work.rows)
        work.logits[r.row * work.logits_stride + v] = v < work.valid ? x : neg_inf();
    }
    if (is_cut(x, work.vocab_start + v, cut_logit(r.cut), cut_tie(r.cut))) x = neg_inf();
    if (work.scaled) x = mul(x, r.scale);
    if (v == r.target) partial.y_target = x;
    y[j] = v < work.valid ? x : neg_inf();
  }
  partial_add_tile<kEntropy>(partial, y);
}

template <bool kEntropy>
VS_DEVICE void plain_finish(const Partial& partial, const PlainRow& r, int split, const PlainParams& p) {
  if (r.row >= p.work.rows) return;
  const int64_t words = kEntropy ? kRecordWordsEntropy : kRecordWords;
  record_store<kEntropy>(p.splits + split * words * p.work.rows + r.row, p.work.rows, partial);
}

}  // namespace vocabshard::sm90
