// From a consumer's accumulators to y, in registers: bias, softcap, logits, target, temperature, padding.
//
// A lane q of a quad holds, of each of its rows, the 16 columns 16 q ... 16 q + 15 of every group of 64: the copy of
// `weight` into shared memory permuted its rows so. The last, partial group comes as it lies and is exchanged here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "contract.h"
#include "sampling.h"
#include "sm90/lanes.h"
#include "sm90/params.h"
#include "sm90/ptx.h"
#include "sm90/softcap.h"

namespace vocabshard::sm90 {

template <int kMBlocks, int kGroups>
struct Accumulator {
  static constexpr int kRowGroups = 2 * kMBlocks;  // rows a lane has a part of
  float d[kMBlocks][32 * kGroups];

  // Nothing that reads the accumulators may be moved above this.
  VS_DEVICE void settle() {
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m)
#pragma unroll
      for (int i = 0; i < 32 * kGroups; ++i) asm volatile("" : "+f"(d[m][i])::"memory");
  }

  // clamp_finite, in place.
  VS_DEVICE void clamp() {
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m)
#pragma unroll
      for (int i = 0; i < 32 * kGroups; ++i) clamp_finite(d[m][i]);
  }

  // Column j of the lane's tile in group a, of row group r (64-row block r / 2, its upper or lower 8 rows).
  VS_DEVICE float& at(int r, int a, int j) { return d[r / 2][32 * a + 4 * (j / 2) + 2 * (r % 2) + j % 2]; }

  struct Row {
    float y[kGroups][kTile];
  };
  VS_DEVICE Row row(int r) {
    Row row;
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
#pragma unroll
      for (int j = 0; j < kTile; ++j) row.y[a][j] = at(r, a, j);
    return row;
  }
};

// Row of the block of M that row group r is for this lane.
VS_DEVICE int32_t row_of(int r, int warp, int lane) { return 64 * (r / 2) + 16 * warp + 8 * (r % 2) + lane / 4; }

VS_DEVICE float load_bias(const void* bias, int32_t type, int64_t column) {
  if (type == kBiasBfloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[column]);
  if (type == kBiasHalf) return __half2float(static_cast<const __half*>(bias)[column]);
  return static_cast<const float*>(bias)[column];
}

// `bias` holds the tile's columns in shared memory.
template <int kMBlocks, int kGroups>
VS_DEVICE void add_bias(Accumulator<kMBlocks, kGroups>& acc, const float* bias, int lane) {
#pragma unroll
  for (int a = 0; a < kGroups; ++a)
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      const float4 b = *reinterpret_cast<const float4*>(bias + kGroupColumns * a + lane % 4 * 16 + j);
#pragma unroll
      for (int r = 0; r < 2 * kMBlocks; ++r) {
        acc.at(r, a, j) = add(acc.at(r, a, j), b.x);
        acc.at(r, a, j + 1) = add(acc.at(r, a, j + 1), b.y);
        acc.at(r, a, j + 2) = add(acc.at(r, a, j + 2), b.z);
        acc.at(r, a, j + 3) = add(acc.at(r, a, j + 3), b.w);
      }
    }
}

// Lanes that differ in bit kLane change places with blocks of four that differ in bit kBlock.
template <int kBlock, int kLane>
VS_DEVICE void exchange_blocks(float (&x)[16], int lane) {
  const bool upper = (lane & kLane) != 0;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (j / 4 & kBlock) continue;
    const float low = x[j], high = x[j + 4 * kBlock];
    const float got = __shfl_xor_sync(~0u, upper ? low : high, kLane);
    x[j] = upper ? got : low;
    x[j + 4 * kBlock] = upper ? high : got;
  }
}

// A group that came as it lies: lane q holds columns 8 i + 2 q + e at j = 2 i + e, and is to hold 16 q + j. In blocks
// of four columns (i / 2 the block, i % 2 and e inside) lane and block change places: a transposition within the quad.
template <int kMBlocks, int kGroups>
VS_DEVICE void exchange_tail(Accumulator<kMBlocks, kGroups>& acc, int a, int lane) {
#pragma unroll
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    float x[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) x[j] = acc.at(r, a, j);
    exchange_blocks<1, 1>(x, lane);
    exchange_blocks<2, 2>(x, lane);
    // now block s holds what lane s had: columns 16 q + 2 s + e, and 8 further on
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float& to = acc.at(r, a, 8 * (j / 2 % 2) + 2 * (j / 4) + j % 2);
      to = x[j];
      asm volatile("" : "+f"(to));  // moved here, not all at once further down
    }
  }
}

// Softcap in a loop that turns the accumulators round: its code is long, and rarely wanted.
template <int kMBlocks, int kGroups>
VS_DEVICE void softcap_all(Accumulator<kMBlocks, kGroups>& acc, float cap) {
  constexpr int kPerBlock = 32 * kGroups, kAll = kMBlocks * kPerBlock, kStep = 16;
  const float inverse = __frcp_rn(cap);
  const bool fast_cap = cap >= kSoftcapFastFrom && cap <= 1.0f / kSoftcapFastFrom;
#pragma unroll 1
  for (int i = 0; i < kAll / kStep; ++i) {
    float head[kStep], least = kFastFrom, most = kFastFrom;
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      head[j] = acc.d[0][j];
      least = fminf(least, fabsf(head[j]));
      most = ptx::max_nan(most, fabsf(head[j]));
    }
    if (fast_cap && least >= kFastFrom && most <= 1.0f / kFastFrom) {
#pragma unroll
      for (int j = 0; j < kStep; ++j) head[j] = softcap_fast(head[j], cap, inverse);
    } else {
#pragma unroll 1
      for (int j = 0; j < kStep; ++j) {  // turned round as well
        const float first = softcap(head[0], cap);
#pragma unroll
        for (int k = 0; k < kStep - 1; ++k) head[k] = head[k + 1];
        head[kStep - 1] = first;
      }
    }
#pragma unroll
    for (int j = 0; j < kAll - kStep; ++j)
      acc.d[j / kPerBlock][j % kPerBlock] = acc.d[(j + kStep) / kPerBlock][(j + kStep) % kPerBlock];
#pragma unroll
    for (int j = 0; j < kStep; ++j) acc.d[kMBlocks - 1][kPerBlock - kStep + j] = head[j];
  }
}

// Before temperature. `columns` is what exists from the tile's first column on. Eight lanes exchange what they own of
// two rows, so that a store writes whole lines: 32 columns of each of four rows.
template <int kMBlocks, int kGroups>
VS_DEVICE void store_logits(Accumulator<kMBlocks, kGroups>& acc, const RowWork& work, int32_t first_row,
                            int64_t first_column, int32_t columns, int warp, int lane) {
  const bool aligned = work.logits_stride % 4 == 0 && reinterpret_cast<uintptr_t>(work.logits) % 16 == 0;
  const int32_t own_column = lane % 8 * 4;
#pragma unroll
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    const int32_t row = first_row + row_of(r, warp, lane & ~4);  // and the next one
    if (ptx::uniform(row) >= work.rows) continue;
    float* out = work.logits + row * work.logits_stride + first_column;
#pragma unroll
    for (int a = 0; a < kGroups; ++a) {
      if (kGroupColumns * a >= columns) continue;
      float x[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) x[j] = acc.at(r, a, j);
      exchange_blocks<1, 1>(x, lane);
      exchange_blocks<2, 2>(x, lane);
      exchange_blocks<1, 4>(x, lane);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (row + b % 2 >= work.rows) continue;
        const int32_t column = kGroupColumns * a + 32 * (b / 2) + own_column;
        float* to = out + b % 2 * work.logits_stride + column;
        if (aligned && column + 4 <= columns) {
          *reinterpret_cast<float4*>(to) = make_float4(x[4 * b], x[4 * b + 1], x[4 * b + 2], x[4 * b + 3]);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (column + j < columns) to[j] = x[4 * b + j];
        }
      }
    }
  }
}

// The largest of every group; padding is -inf.
template <int kMBlocks, int kGroups>
VS_DEVICE void store_maxima(Accumulator<kMBlocks, kGroups>& acc, const RowWork& work, int32_t first_row,
                            int64_t first_column, int32_t valid, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    const int32_t row = first_row + row_of(r, warp, lane);
    float* const to = work.maxima.at + row * work.maxima.row_stride + first_column / kGroupColumns;
#pragma unroll
    for (int a = 0; a < kGroups; ++a) {
      float most = acc.at(r, a, 0);
#pragma unroll
      for (int j = 1; j < kTile; ++j) most = fmaxf(most, acc.at(r, a, j));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if (lane % 4 == 0 && row < work.rows && kGroupColumns * a < valid) to[a] = most;
    }
  }
}

// Columns beyond their row's cut become -inf; before temperature, NaN stays.
template <int kMBlocks, int kGroups>
VS_DEVICE void leave_out(Accumulator<kMBlocks, kGroups>& acc, const RowWork& work, int32_t first_row,
                         int64_t first_column, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    const int64_t cut = work.cut[min(first_row + row_of(r, warp, lane), work.rows - 1)];
    const float logit = cut_logit(cut);
    // of equals those up to this column, counted from the lane's first, stay
    const int64_t tie = cut_tie(cut) - (work.vocab_start + first_column + lane % 4 * 16);
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float& z = acc.at(r, a, j);
        z = z < logit || (z == logit && kGroupColumns * a + j > tie) ? neg_inf() : z;
      }
  }
}

// The y of targets that lie in the tile: at most one lane of one warp of the grid has each. `targets`: local columns of
// the block's rows, or -1, in shared memory.
template <int kMBlocks, int kGroups>
VS_DEVICE void store_targets(Accumulator<kMBlocks, kGroups>& acc, const int32_t* targets, float* target_y,
                             int32_t first_row, int32_t first_column, int32_t valid, int warp, int lane) {
  constexpr int kRows = 16 * kMBlocks;  // of a warp: lane l looks at row group l / 8, row l % 8
  const int32_t column = lane < kRows ? targets[row_of(lane / 8, warp, 4 * (lane % 8))] - first_column : -1;
  const bool here = column >= 0 && column < valid;
  if (!__any_sync(~0u, here)) return;
  const int32_t local = here ? column : -1;
#pragma unroll
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    const int32_t wanted = __shfl_sync(~0u, local, 8 * r + lane / 4) - 16 * (lane % 4);
    float y = 0.0f;
    bool found = false;
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
#pragma unroll
      for (int j = 0; j < 16; ++j)
        if (wanted == kGroupColumns * a + j) {
          y = acc.at(r, a, j);
          found = true;
        }
    if (found) target_y[first_row + row_of(r, warp, lane)] = y;
  }
}

}  // namespace vocabshard::sm90
