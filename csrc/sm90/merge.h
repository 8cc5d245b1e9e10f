// From partials in the workspace to one record a row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/params.h"

namespace vocabshard::sm90 {

// Bytes of the partials of one block of rows of one consumer.
constexpr int64_t lanes_place_bytes(int m_blocks, bool entropy) { return 4 * (2 * m_blocks) * (entropy ? 4 : 2) * 512; }
inline int64_t lanes_bytes(const Schedule& s, int m_blocks, bool entropy) {
  return static_cast<int64_t>(s.clusters) * 4 * most_m(s) * lanes_place_bytes(m_blocks, entropy);
}

// `records` points at the first of these rows; words are record_stride apart.
void launch_merge_lanes(const WgmmaParams& p, int m_blocks, bool entropy, int64_t* records, int64_t record_stride,
                        cudaStream_t stream);

// Partials in the form of records, [splits][words][rows]. None: the identity.
void launch_merge_splits(const int64_t* split_records, int splits, int32_t rows, bool entropy, int64_t* records,
                         int64_t record_stride, cudaStream_t stream);

}  // namespace vocabshard::sm90
