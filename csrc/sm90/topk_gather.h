// The lists of the forward that ranks columns: where they lie in the workspace, and what is made of them.
#pragma once

#include <algorithm>

#include "sm90/forward_wgmma.h"
#include "sm90/launch.h"
#include "sm90/params.h"
#include "sm90/topk.h"

namespace vocabshard::sm90 {

constexpr int kListTile = 16 * kShape128.groups;  // entries that a tile may add to a list
constexpr int kMostLimit = 96;

struct ListShape {
  int32_t limit, capacity;
  int64_t states, lists, scratch;  // bytes
};

inline ListShape list_shape(const Schedule& s, int32_t n) {
  const int32_t limit = std::min(2 * n + 8, kMostLimit), capacity = limit + kListTile;
  const int64_t ctas = int64_t{2} * s.clusters;
  const int64_t lists = ctas * places(s) * 4 * (2 * kShape128.m_blocks) * 32;
  return {limit, capacity, lists * 16, lists * capacity * 8, ctas * 4 * kMostTop * 8};
}

int64_t topk_lists_bytes(const Schedule& schedule, int32_t n);
// workspace: so many bytes, aligned to 16.
TopkLists topk_lists(const Schedule& schedule, const TopkRows& top, void* workspace);

// best [rows, n] as p.top has it, and of the lists: the best of both. Right behind the forward and its merge.
void launch_topk_gather(const WgmmaParams& p, int64_t* best, cudaStream_t stream);

}  // namespace vocabshard::sm90
