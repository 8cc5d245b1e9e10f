// What the forward keeps of a tile: codes and references (kept_code.h).
#pragma once

#include "sm90/epilogue.h"
#include "sm90/kept_code.h"
#include "sm90/params.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

// Of the tile's groups, y in padding -inf. Lane q of a quad has columns 16 q ... 16 q + 15 of each of its rows.
template <int kMBlocks, int kGroups>
VS_DEVICE void store_kept(Accumulator<kMBlocks, kGroups>& acc, const KeptRows& kept, const int4& tile) {
#pragma unroll
  for (int r = 0; r < 2 * kMBlocks; ++r) {
#pragma unroll
    for (int a = 0; a < kGroups; ++a) {
      // one after the other: accumulators fill the registers
#pragma unroll
      for (int j = 0; j < 16; ++j) asm volatile("" : "+f"(acc.at(r, a, j))::"memory");
      float y_max = acc.at(r, a, 0);
#pragma unroll
      for (int j = 1; j < 16; ++j) y_max = fmaxf(y_max, acc.at(r, a, j));
      y_max = fmaxf(y_max, __shfl_xor_sync(~0u, y_max, 1));
      y_max = fmaxf(y_max, __shfl_xor_sync(~0u, y_max, 2));
      const float reference = kept_reference(y_max);
      const KeptScale scale = kept_scale(reference);

      const int thread = ptx::thread(), lane = thread % 32;
      const int32_t row = tile.x * (64 * kMBlocks) + row_of(r, thread / 32 % 4, lane), group = tile.y + a;
      const bool wanted = row < kept.rows && a < tile.z && group < kept.groups;
      uint16_t* to = kept.codes + row * kept.codes_row + group * kGroupColumns + lane % 4 * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = 8 * half + 2 * i;
          x[i] = __byte_perm(kept_code(acc.at(r, a, j), scale), kept_code(acc.at(r, a, j + 1), scale), 0x5410);
        }
        ptx::store_stream_if(wanted, to + 8 * half, make_uint4(x[0], x[1], x[2], x[3]));
      }
      ptx::store_stream_if(wanted && lane % 4 == 0, kept.references + group * kept.references_group + row, reference);
    }
  }
}

}  // namespace vocabshard::sm90
