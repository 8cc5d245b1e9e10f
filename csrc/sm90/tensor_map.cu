#include <algorithm>

#include "sm90/check.h"
#include "sm90/tensor_map.h"

namespace vocabshard::sm90 {

namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Looked up at run time: the library is not linked against the driver.
Encode encode_function() {
  static const Encode function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess || entry == nullptr)
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled: a driver for CUDA 12 or later is needed");
    return reinterpret_cast<Encode>(entry);
  }();
  return function;
}

template <int kRank>
CUtensorMap encode(const void* base, bool half_precision, const cuuint64_t (&sizes)[kRank],
                   const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  CUtensorMap map;
  cuuint32_t ones[kRank];
  for (cuuint32_t& one : ones) one = 1;
  const CUresult status = encode_function()(
      &map, half_precision ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank,
      const_cast<void*>(base), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled refused a matrix of depth " + std::to_string(sizes[0]) +
                             " and row stride " + std::to_string(strides[0]) + " bytes: error " +
                             std::to_string(static_cast<int>(status)));
  return map;
}

}  // namespace

CUtensorMap map_rows(const void* base, bool half_precision, int64_t rows, int64_t depth, int64_t row_stride,
                     int box_rows) {
  return encode<2>(base, half_precision, {static_cast<cuuint64_t>(depth), static_cast<cuuint64_t>(rows)},
                   {static_cast<cuuint64_t>(2 * row_stride)},
                   {static_cast<cuuint32_t>(kDepth), static_cast<cuuint32_t>(box_rows)});
}

CUtensorMap map_groups(const void* base, bool half_precision, int64_t groups, int64_t depth, int64_t row_stride,
                       int box_groups, bool half_group) {
  const cuuint64_t row = 2 * row_stride;
  return encode<5>(base, half_precision, {static_cast<cuuint64_t>(depth), 2, 4, 8, static_cast<cuuint64_t>(groups)},
                   {row, 16 * row, 2 * row, 64 * row},
                   {static_cast<cuuint32_t>(kDepth), 2, 4, half_group ? 4u : 8u, static_cast<cuuint32_t>(box_groups)});
}

Operands map_operands(const Rows& hidden, const Rows& weight, int64_t depth, bool half_precision,
                      const WgmmaShape& shape, bool share_columns) {
  const int64_t whole_groups = weight.count / kGroupColumns;
  Operands o = {};
  o.share_columns = share_columns;
  const int32_t most_rows = (share_columns ? 64 : 32) * shape.m_blocks;
  // no more than there are, by eights as the swizzle goes: rows out of bounds take the copy engine's time too
  const int64_t some_rows = (hidden.count + (share_columns ? 7 : 15)) / (share_columns ? 8 : 16) * 8;
  o.hidden_rows = static_cast<int32_t>(std::min<int64_t>(most_rows, some_rows));
  o.hidden = map_rows(hidden.base, half_precision, hidden.count, depth, hidden.stride, o.hidden_rows);
  if (weight.count % kGroupColumns != 0)
    o.tail = map_rows(weight.base, half_precision, weight.count, depth, weight.stride,
                      share_columns ? kGroupColumns / 2 : kGroupColumns);
  if (whole_groups > 0) {
    o.group = map_groups(weight.base, half_precision, whole_groups, depth, weight.stride, 1, share_columns);
    o.tile = share_columns
                 ? o.group
                 : map_groups(weight.base, half_precision, whole_groups, depth, weight.stride, shape.groups, false);
  } else {
    o.group = o.tile = o.tail;
  }
  o.k_blocks = static_cast<int32_t>((depth + kDepth - 1) / kDepth);
  o.whole_groups = static_cast<int32_t>(whole_groups);
  return o;
}

}  // namespace vocabshard::sm90
