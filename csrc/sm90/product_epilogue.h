// Between a consumer's accumulators and memory. Lane q of a quad holds, of each block of 8 columns, columns 2 q and
// 2 q + 1 of two rows. Memory is written 16 bytes a lane, so the lanes of a quad exchange values first.
//
// Addresses are worked out anew for every row: where accumulators fill the registers, nothing cheap is kept.
#pragma once

#include "contract.h"
#include "sm90/pack.h"
#include "sm90/product.h"
#include "sm90/product_params.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

constexpr int kMostBlocksToRound = 2;  // where the choice is made row by row: with more accumulators it spills
constexpr int kMostBlocksToAdd = 2;    // a row's old values and more accumulators do not fit the registers

// kBlocks blocks of 64 rows. Row 8 h + lane / 4 of a warp's 16, column 8 j + 2 q + e: at 4 j + 2 h + e.
template <int kBlocks, int kColumns>
struct ProductTile {
  float d[kBlocks][kColumns / 2];

  VS_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) d[m][i] = 0.0f;
  }

  // Nothing that reads the accumulators may be moved above this.
  VS_DEVICE void settle() {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(d[m][i])::"memory");
  }
  // The same of four blocks of columns from j on, of one row: what is made of them is not made earlier, and kept.
  VS_DEVICE void settle(int m, int h, int j) {
#pragma unroll
    for (int i = j; i < j + 4; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) asm volatile("" : "+f"(d[m][4 * i + 2 * h + e])::"memory");
  }
};

VS_DEVICE int64_t tile_row(int32_t first_row, int m, int h) {
  const uint32_t thread = ptx::thread();
  return static_cast<int64_t>(first_row) + 64 * m + thread / 32 % 4 * 16 + 8 * h + thread % 32 / 4;
}
VS_DEVICE int quad_lane() { return ptx::thread() % 4; }

// From a pair of block j and one of block j + 1 to four columns of one of them: a lane's own pair stays, the other goes
// to its neighbour. Even lanes get block j.
VS_DEVICE float4 exchange_pairs(const float* d, int q) {
  const bool odd = q % 2;
  const float x = __shfl_xor_sync(0xffffffffu, odd ? d[0] : d[4], 1);
  const float y = __shfl_xor_sync(0xffffffffu, odd ? d[1] : d[5], 1);
  return odd ? make_float4(x, y, d[4], d[5]) : make_float4(d[0], d[1], x, y);
}
VS_DEVICE int32_t exchanged_column(int q) { return 8 * (q % 2) + 4 * (q / 2); }

// Reading costs the other consumer's products a cycle a line: lanes read 16 bytes, 64 of a line at a time, and exchange
// them. Three blocks leave no registers for that, and lanes read their own pairs. Either way they pause (nanoseconds),
// so that the products lose no more at a time than they can make up for. No branch on p.init, ptxas would put all
// products one behind the other.
template <int kBlocks, int kColumns>
VS_DEVICE void load_init(ProductTile<kBlocks, kColumns>& acc, const ProductParams& p, int32_t first_row,
                         int32_t first_column, uint32_t pause) {
  const int32_t rows = p.init == nullptr ? 0 : p.rows;
  const int q = quad_lane();
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = tile_row(first_row, m, h);
      const int32_t of_row = row < rows ? p.columns : 0;
      if constexpr (kBlocks < 3) {
        const int32_t column = first_column + exchanged_column(q);
        const float* from = p.init + row * p.init_row + column;
        float4 v[kColumns / 16] = {};
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 2) {
          if (8 * j < of_row - column) v[j / 2] = __ldcg(reinterpret_cast<const float4*>(from + 8 * j));
        }
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 2) {
          float* d = acc.d[m] + 4 * j + 2 * h;
          d[0] = v[j / 2].x, d[1] = v[j / 2].y, d[4] = v[j / 2].z, d[5] = v[j / 2].w;
          const float4 own = exchange_pairs(d, q);
          d[0] = own.x, d[1] = own.y, d[4] = own.z, d[5] = own.w;
          if (j % 4 == 2) acc.settle(m, h, j - 2);
        }
        ptx::pause(4 * pause);
      } else {
        const int32_t column = first_column + 2 * q;
        const float* from = p.init + row * p.init_row + column;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          float2 v = make_float2(0.0f, 0.0f);
          if (8 * j < of_row - column) v = __ldcg(reinterpret_cast<const float2*>(from + 8 * j));
          acc.d[m][4 * j + 2 * h] = v.x, acc.d[m][4 * j + 2 * h + 1] = v.y;
          if (j % 4 == 3) ptx::pause(pause);
        }
      }
    }
}

VS_DEVICE void put_floats(float* to, const float4& v, const ProductParams& p) {
  if (p.output == kProductAdd)
    ptx::add_in_memory(to, v);
  else
    __stcg(reinterpret_cast<float4*>(to), v);
}

template <int kBlocks, int kColumns>
VS_DEVICE void store_floats(ProductTile<kBlocks, kColumns>& acc, const ProductParams& p, int m, int h, int64_t row,
                            int32_t first_column, uint32_t pause) {
  const int q = quad_lane();
  const int32_t column = first_column + exchanged_column(q), end = row < p.rows ? p.columns - column : 0;
  float* to = static_cast<float*>(p.out) + row * p.out_row + column;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    if (j % 4 == 0) {
      ptx::pause(pause);
      acc.settle(m, h, j);
    }
    const float4 v = exchange_pairs(acc.d[m] + 4 * j + 2 * h, q);
    if (8 * j < end) put_floats(to + 8 * j, v, p);
  }
}

template <int kBlocks, int kColumns>
VS_DEVICE void add_floats(ProductTile<kBlocks, kColumns>& acc, const ProductParams& p, int m, int h, int64_t row,
                          int32_t first_column) {
  const int q = quad_lane();
  const int32_t column = first_column + exchanged_column(q), end = row < p.rows ? p.columns - column : 0;
  float* to = static_cast<float*>(p.out) + row * p.out_row + column;
  float4 before[kColumns / 16];
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2)
    if (8 * j < end) before[j / 2] = __ldcg(reinterpret_cast<const float4*>(to + 8 * j));
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    const float4 b = before[j / 2], v = exchange_pairs(acc.d[m] + 4 * j + 2 * h, q);
    const float4 sum = make_float4(add(b.x, v.x), add(b.y, v.y), add(b.z, v.z), add(b.w, v.w));
    if (8 * j < end) __stcg(reinterpret_cast<float4*>(to + 8 * j), sum);
  }
}

// Four blocks of 8 columns: from a pair of each block a lane to one whole block a lane.
VS_DEVICE uint4 transpose_quad(const uint32_t (&v)[4], int q) {
  const bool odd = q & 1, upper = q & 2;
  const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 1);
  const uint32_t low0 = odd ? a : v[0], low1 = odd ? v[1] : a, high0 = odd ? b : v[2], high1 = odd ? v[3] : b;
  const uint32_t c = __shfl_xor_sync(0xffffffffu, upper ? low0 : high0, 2);
  const uint32_t d = __shfl_xor_sync(0xffffffffu, upper ? low1 : high1, 2);
  return upper ? make_uint4(c, d, high0, high1) : make_uint4(low0, low1, c, d);
}

template <class Element, int kBlocks, int kColumns>
VS_DEVICE void store_elements(ProductTile<kBlocks, kColumns>& acc, const ProductParams& p, int m, int h, int64_t row,
                              int32_t first_column) {
  const int q = quad_lane();
  const int32_t column = first_column + 8 * q, end = row < p.rows ? p.columns - column : 0;
  Element* to = static_cast<Element*>(p.out) + row * p.out_row + column;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 4) {
    acc.settle(m, h, j);
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* d = acc.d[m] + 4 * (j + i) + 2 * h;
      v[i] = pack<Element>(d[0], d[1]);
    }
    const uint4 block = transpose_quad(v, q);
    if (8 * j < end) __stcg(reinterpret_cast<uint4*>(to + 8 * j), block);
  }
}

template <int kBlocks, class Row>
VS_DEVICE void each_row(int32_t first_row, const Row& row) {
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) row(m, h, tile_row(first_row, m, h));
}

template <class Element, int kBlocks, int kColumns>
VS_DEVICE void store_tile(ProductTile<kBlocks, kColumns>& acc, const ProductParams& p, int32_t first_row,
                          int32_t first_column, uint32_t pause) {
  if (p.output == kProductElement) {
    each_row<kBlocks>(first_row,
                      [&](int m, int h, int64_t row) { store_elements<Element>(acc, p, m, h, row, first_column); });
    return;
  }
  if constexpr (kBlocks <= kMostBlocksToAdd) {
    if (p.output == kProductAdd) {
      each_row<kBlocks>(first_row, [&](int m, int h, int64_t row) {
        ptx::pause(4 * pause);
        add_floats(acc, p, m, h, row, first_column);
      });
      return;
    }
  }
  each_row<kBlocks>(first_row,
                    [&](int m, int h, int64_t row) { store_floats(acc, p, m, h, row, first_column, pause); });
}

// A row that is not active stays what it was: `out`, which is `init`, or zeros.
template <class Element, int kBlocks, int kColumns>
VS_DEVICE void store_active(ProductTile<kBlocks, kColumns>& acc, const ProductParams& p, int32_t first_row,
                            int32_t first_column, uint32_t pause) {
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int64_t row = tile_row(first_row, m, h);
      if (p.row_active != nullptr && row < p.rows && p.row_active[row] == 0) {
        if (p.init != nullptr || p.output == kProductAdd) row = p.rows;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) acc.d[m][4 * j + 2 * h] = acc.d[m][4 * j + 2 * h + 1] = 0.0f;
      }
      if (kBlocks <= kMostBlocksToRound && p.output == kProductElement)
        store_elements<Element>(acc, p, m, h, row, first_column);
      else
        store_floats(acc, p, m, h, row, first_column, pause);
    }
}

}  // namespace vocabshard::sm90
