// From partials in the workspace to one record a row, or to its results.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/params.h"

namespace vocabshard::sm90 {

// Bytes of WgmmaParams::partials.
inline int64_t partials_bytes(const Schedule& s, int m_blocks, int64_t record_words) {
  return static_cast<int64_t>(s.clusters) * 2 * places(s) * record_words * (64 * m_blocks) * 8;
}

// Where merged rows go; pointers are at the first of them.
struct Merged {
  const int64_t* target_ids;
  int64_t* records;  // words are record_stride apart; null: `fold`
  int64_t record_stride;
  FoldRows fold;
  DrawnRows drawn;  // where tokens are drawn
};

// To be launched right behind the forward; the second one behind one that draws.
void launch_merge_clusters(const WgmmaParams& p, int m_blocks, bool entropy, const Merged& out, cudaStream_t stream);
void launch_merge_drawn(const WgmmaParams& p, const Merged& out, cudaStream_t stream);

// Partials in the form of records, [splits][words][rows]. None: the identity.
void launch_merge_splits(const int64_t* split_records, int splits, int32_t rows, bool entropy, const Merged& out,
                         cudaStream_t stream);

}  // namespace vocabshard::sm90
