// TMA's description of a matrix. Made on the host at every call: nothing to go stale.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "sm90/params.h"

namespace vocabshard::sm90 {

// [rows, depth] of 2-byte elements, row_stride elements apart, 64 x box_rows at a time. Outside it is zero.
CUtensorMap map_rows(const void* base, bool half_precision, int64_t rows, int64_t depth, int64_t row_stride,
                     int box_rows);

// The whole groups of 64 rows of the same, in the order of an accumulator: row 8 i + 2 q + e of a group is
// row 16 q + 2 i + e of the matrix. box_groups groups at a time, or with half_group half of each (four i).
CUtensorMap map_groups(const void* base, bool half_precision, int64_t groups, int64_t depth, int64_t row_stride,
                       int box_groups, bool half_group);

// Rows of 2-byte elements, the elements of a row side by side.
struct Rows {
  const void* base;
  int64_t count, stride;  // stride in elements
};

// What mainloop.cuh multiplies: hidden [N, depth] and weight [V_local, depth]. The CTAs of a cluster share rows, or
// columns.
Operands map_operands(const Rows& hidden, const Rows& weight, int64_t depth, bool half_precision,
                      const WgmmaShape& shape, bool share_columns = false);

}  // namespace vocabshard::sm90
