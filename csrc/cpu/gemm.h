// The matrix product: a register tile of kTileRows rows by up to kTilePanels panels of 16 lanes, one FMA chain an
// element.
#pragma once

#include "cpu/lanes.h"

namespace vocabshard::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 8, kTilePanels = 3;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTilePanels = 1;  // 12 accumulators of 16 registers
#else
constexpr int kTileRows = 2, kTilePanels = 1;
#endif

// a(i, k) = a[i * stride + k] (rows) or a[i + k * stride] (columns).
template <int kPanels, bool kColumns>
static void tile(int64_t k, const float* a, int64_t stride, const float* b, int64_t b_panel, float* const* c,
                 int mode) {
  constexpr int kVectors = kPanels * kParts;
  NativeF acc[kTileRows][kVectors];
  for (int i = 0; i < kTileRows; ++i)
    for (int j = 0; j < kVectors; ++j) acc[i][j] = mode == kChain ? native_load(c[i] + j * kWidth) : NativeF{};
  for (int64_t step = 0; step < k; ++step) {
    NativeF lanes[kVectors];
    for (int p = 0; p < kPanels; ++p)
      for (int i = 0; i < kParts; ++i) lanes[p * kParts + i] = native_load(b + p * b_panel + i * kWidth);
    b += kLanes;
    for (int i = 0; i < kTileRows; ++i) {
      const NativeF scalar = native_set(kColumns ? a[i] : a[i * stride]);
      for (int j = 0; j < kVectors; ++j) acc[i][j] = native_fma(scalar, lanes[j], acc[i][j]);
    }
    a += kColumns ? stride : 1;
  }
  for (int i = 0; i < kTileRows; ++i)
    for (int j = 0; j < kVectors; ++j) {
      float* out = c[i] + j * kWidth;
      native_store(out, mode == kAdd ? native_load(out) + acc[i][j] : acc[i][j]);
    }
}

template <bool kColumns>
static void tile_of(int panels, int64_t k, const float* a, int64_t stride, const float* b, int64_t b_panel,
                    float* const* c, int mode) {
  if constexpr (kTilePanels >= 3)
    if (panels == 3) return tile<3, kColumns>(k, a, stride, b, b_panel, c, mode);
  if constexpr (kTilePanels >= 2)
    if (panels == 2) return tile<2, kColumns>(k, a, stride, b, b_panel, c, mode);
  tile<1, kColumns>(k, a, stride, b, b_panel, c, mode);
}

static void multiply(const Product& x) {
  const bool columns = x.a_row == 1 && x.a_step != 1;
  for (int64_t j = 0; j < x.n; j += kTilePanels * kLanes) {
    const int64_t wide = x.n - j < kTilePanels * kLanes ? x.n - j : kTilePanels * kLanes;
    const int panels = static_cast<int>((wide + kLanes - 1) / kLanes);
    const float* b = x.b + j / kLanes * x.b_panel;
    for (int64_t i = 0; i < x.m; i += kTileRows) {
      const int64_t high = x.m - i < kTileRows ? x.m - i : kTileRows;
      const float* a = x.a + i * x.a_row;
      alignas(64) float edge[kTileRows][kTilePanels * kLanes];
      float* c[kTileRows];
      const bool ragged = high < kTileRows || wide < panels * kLanes;
      for (int r = 0; r < kTileRows; ++r) {
        const int64_t row = i + (r < high ? r : 0);
        c[r] = ragged ? edge[r] : x.c + (x.c_index ? x.c_index[row] : row) * x.c_row + j;
      }
      if (ragged && x.mode == kChain)
        for (int r = 0; r < kTileRows; ++r)
          for (int64_t l = 0; l < wide; ++l) {
            const int64_t row = x.c_index ? x.c_index[i + (r < high ? r : 0)] : i + r;
            edge[r][l] = r < high ? x.c[row * x.c_row + j + l] : 0.0f;
          }
      const int mode = ragged && x.mode == kAdd ? kStore : x.mode;
      if (columns)
        tile_of<true>(panels, x.k, a, x.a_step, b, x.b_panel, c, mode);
      else
        tile_of<false>(panels, x.k, a, x.a_row, b, x.b_panel, c, mode);
      if (!ragged) continue;
      for (int64_t r = 0; r < high; ++r) {
        float* out = x.c + (x.c_index ? x.c_index[i + r] : i + r) * x.c_row + j;
        for (int64_t l = 0; l < wide; ++l) out[l] = x.mode == kAdd ? out[l] + edge[r][l] : edge[r][l];
      }
    }
  }
}

}  // namespace
}  // namespace vocabshard::cpu
