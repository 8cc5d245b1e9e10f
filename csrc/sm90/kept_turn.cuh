// Kept logits (kept_code.h) turned into dlogits where they lie, by warps of a kernel that has other work: few
// registers, no shared memory, no barrier.
#pragma once

#include "sm90/dlogit.h"
#include "sm90/kept_code.h"
#include "sm90/pack.h"
#include "sm90/schedule.h"

namespace vocabshard::sm90 {

template <bool kPlain>
VS_DEVICE float kept_dlogit(float l, const DlogitsRow& row) {
  return mul(ptx::exp2(l), kPlain ? row.factor : fma(row.slope, l, row.factor));
}

template <bool kPlain>
VS_DEVICE uint32_t turn_pair(uint32_t codes, float base, const DlogitsRow& row) {
  uint32_t x = pack<__nv_bfloat16>(kept_dlogit<kPlain>(kept_log2_p(codes & 0xffffu, base), row),
                                   kept_dlogit<kPlain>(kept_log2_p(codes >> 16, base), row));
  asm volatile("" : "+r"(x));  // one pair after the other: registers are few
  return x;
}

// This warp's part, of `workers` warps: 32 rows of 256 columns at a time, a row's 8 columns a lane. A lane holds the
// terms of one row and hands them to the others, and writes what its row's target gets in the end. p.out is p.codes,
// and there are no sums.
template <bool kPlain>
VS_DEVICE void turn_kept(const DlogitsKeptCall& p) {
  const int32_t width = static_cast<int32_t>((p.columns + kGroupColumns - 1) / kGroupColumns * kGroupColumns);
  const int32_t strips = (width + 255) / 256, items = strips * static_cast<int32_t>((p.rows + 31) / 32);
  const auto lane = [] { return static_cast<int32_t>(ptx::thread() % 32); };
  int32_t item = static_cast<int32_t>(2 * blockIdx.x + ptx::thread() / 32 % 2);
#pragma unroll 1
  for (; item < items; item += static_cast<int32_t>(2 * gridDim.x)) {
    {
      const int32_t first = item / strips * 32, column = item % strips * 256 + lane() * 8;
      const int32_t rows = min(static_cast<int32_t>(p.rows) - first, 32);
      const bool wanted = column < width;
      const DlogitsRow row = load_row(p.row_terms + first + min(lane(), rows - 1));
      uint32_t reference = static_cast<uint32_t>(min(column, width - 1) / kGroupColumns * p.references_group + first);
      uint4* at = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + first * p.out_row + column);
      const auto load = [&](int32_t i) {
        return wanted && i < rows ? __ldcg(at + i * (p.out_row / 8)) : make_uint4(0, 0, 0, 0);
      };
      uint4 next = load(0), later = load(1);
#pragma unroll 1
      for (int32_t i = 0; i < rows; ++i) {
        uint4 x = next;
        next = later;
        later = load(i + 2);
        DlogitsRow of_row;
        of_row.factor = __shfl_sync(~0u, row.factor, i);
        if (!kPlain) of_row.slope = __shfl_sync(~0u, row.slope, i);
        const float minus_int = __shfl_sync(~0u, row.minus_int, i), frac = __shfl_sync(~0u, row.frac, i);
        const float base = add(add(__ldg(p.references + reference), minus_int), -frac);
        ++reference;
        const uint32_t keep = __shfl_sync(~0u, row.keep, i);
        x.x = turn_pair<kPlain>(x.x, base, of_row) & keep, x.y = turn_pair<kPlain>(x.y, base, of_row) & keep;
        x.z = turn_pair<kPlain>(x.z, base, of_row) & keep, x.w = turn_pair<kPlain>(x.w, base, of_row) & keep;
        if (wanted) at[i * (p.out_row / 8)] = x;
      }
    }
    __syncwarp();
    asm volatile("" : "+r"(item));  // worked out anew below
    const int32_t n = item / strips * 32 + lane(), strip = item % strips * 256;
    if (n < p.rows) {
      DlogitsRow row = load_row(p.row_terms + n);
      const int32_t target = row.target - static_cast<int32_t>(p.first_column);
      if (row.target >= 0 && target >= strip && target < min(strip + 256, width) && row.keep != 0) {
        row.scale = 1.0f;
        const float d = dlogit_target<kPlain ? kPlainDlogits : kScaledDlogits>(p.target_y[n], row,
                                                                               p.row_terms[n].target_grad, 0.0f);
        static_cast<uint16_t*>(p.out)[n * p.out_row + target] = pack<__nv_bfloat16>(d, d);
      }
    }
    __syncwarp();
  }
}

}  // namespace vocabshard::sm90
