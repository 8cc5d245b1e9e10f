// contract.h's scalar text, run as it stands: what tests hold the kernels against.

#include "api.h"
#include "contract.h"
#include "cpu/threads.h"

namespace vocabshard {
namespace {

float element(const Matrix& m, int64_t row, int64_t col) {
  const int64_t at = row * m.row_stride + col * m.col_stride;
  return static_cast<const float*>(m.data)[at];
}

template <bool kEntropy>
void row_partials(const float* y, int64_t columns, int64_t target, const int64_t* tile_order, int64_t tiles,
                  const int64_t* splits, int64_t split_count, int64_t* records, int64_t rows) {
  Partial merged = partial_identity();
  int64_t done = 0;
  for (int64_t s = 0; s <= split_count; ++s) {
    Partial part = partial_identity();
    for (const int64_t end = s < split_count ? splits[s] : tiles; done < end; ++done) {
      float tile[kTile];
      for (int64_t i = 0; i < kTile; ++i) {
        const int64_t v = tile_order[done] * kTile + i;
        tile[i] = v < columns ? y[v] : neg_inf();
        if (v == target && v < columns) part.y_target = y[v];
      }
      partial_add_tile<kEntropy>(part, tile);
    }
    partial_merge(merged, part);
  }
  partial_finish(merged);
  record_store<kEntropy>(records, rows, merged);
}

}  // namespace

void spec_exp(const float* y, int64_t count, int32_t* k, float* p) {
  const cpu::PlainFloat plain;
  for (int64_t i = 0; i < count; ++i) {
    const Exp e = exp_split(y[i]);
    k[i] = e.k;
    p[i] = e.p;
  }
}

void spec_log2(const double* x, int64_t count, int32_t* a, double* l) {
  const cpu::PlainFloat plain;
  for (int64_t i = 0; i < count; ++i) {
    const Log2 log = log2_split(x[i]);
    a[i] = log.a;
    l[i] = log.l;
  }
}

void spec_softcap(const float* z, int64_t count, float cap, float* out) {
  const cpu::PlainFloat plain;
  for (int64_t i = 0; i < count; ++i) out[i] = softcap(z[i], cap);
}

void spec_fma_chain(const Matrix& hidden, const Matrix& weight, float* z) {
  const cpu::PlainFloat plain;
  for (int64_t n = 0; n < hidden.rows; ++n)
    for (int64_t v = 0; v < weight.rows; ++v) {
      float sum = 0.0f;
      for (int64_t k = 0; k < hidden.cols; ++k) sum = fma(element(hidden, n, k), element(weight, v, k), sum);
      z[n * weight.rows + v] = sum;
    }
}

void spec_partials(const float* y, int64_t rows, int64_t columns, const int64_t* target, const int64_t* tile_order,
                   int64_t tiles, const int64_t* splits, int64_t split_count, bool entropy, int64_t* records) {
  const cpu::PlainFloat plain;
  for (int64_t n = 0; n < rows; ++n)
    if (entropy)
      row_partials<true>(y + n * columns, columns, target[n], tile_order, tiles, splits, split_count, records + n,
                         rows);
    else
      row_partials<false>(y + n * columns, columns, target[n], tile_order, tiles, splits, split_count, records + n,
                          rows);
}

}  // namespace vocabshard
