// The n best of places in shared memory, descending, by a block of threads.
#pragma once

#include "sampling.h"
#include "sm90/ptx.h"
#include "sm90/topk.h"

namespace vocabshard::sm90 {

constexpr int kTopGroups = 128;  // of threads, each with a best place of its own
static_assert(kMostTop <= kTopGroups, "as many groups as places that are wanted");

// The n-th best of the groups' best places bounds the n-th best of all from below: `mine` is the thread's best, and
// `groups` get theirs. Of groups with any place, n reach the bound, or all of them: hot[0 ... n - 1] says which.
template <int kThreads>
struct Bound {
  static constexpr int kTogether = kThreads / kTopGroups;  // neighbouring threads of a group
  int64_t groups[kTopGroups];
  int64_t bound;
  int32_t hot[kMostTop];

  VS_DEVICE void find(int64_t mine, int32_t n) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
#pragma unroll
    for (int step = 1; step < kTogether; step *= 2) mine = max(mine, __shfl_xor_sync(~0u, mine, step));
    if (thread % kTogether == 0) groups[thread / kTogether] = mine;
    if (thread == 0) bound = kKeepAll + 1;
    __syncthreads();
    if (thread < kTopGroups && groups[thread] != kKeepAll) {
      mine = groups[thread];
      int32_t larger = 0;
#pragma unroll 8
      for (int32_t i = 0; i < kTopGroups; ++i) larger += groups[i] > mine;
      if (larger < n) hot[larger] = thread;
      if (larger == n - 1) bound = mine;
    }
    __syncthreads();
  }
};

template <int kThreads>
struct TopSort {
  static constexpr int kFew = 512, kDirect = 192;
  int64_t sorted[kMostTop];
  int64_t few[kFew];
  int32_t few_count;
};

template <int kThreads>
VS_DEVICE void rank_places(const int64_t* places, int32_t count, int32_t n, int64_t at_least, int64_t* sorted) {
  for (int32_t i = threadIdx.x; i < count; i += kThreads) {
    const int64_t place = places[i];
    if (place < at_least) continue;
    int32_t larger = 0;
#pragma unroll 8
    for (int32_t j = 0; j < count; ++j) larger += places[j] > place;
    if (larger < n) sorted[larger] = place;
  }
}

// To t.sorted, filled up with -2^63, which may stand among the places. Known to all threads before and after.
template <int kThreads>
VS_DEVICE void sort_best(TopSort<kThreads>& t, Bound<kThreads>& b, const int64_t* places, int32_t count, int32_t n) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < n) t.sorted[thread] = kKeepAll;
  if (thread == 0) t.few_count = 0;
  if (count <= t.kDirect) {
    __syncthreads();
    rank_places<kThreads>(places, count, n, kKeepAll + 1, t.sorted);
    __syncthreads();
    return;
  }
  int64_t mine = kKeepAll;
  for (int32_t i = thread; i < count; i += kThreads) mine = max(mine, places[i]);
  b.find(mine, n);
  for (int32_t i = thread; i < count; i += kThreads) {
    if (places[i] < b.bound) continue;
    const int32_t at = atomicAdd(&t.few_count, 1);
    if (at < t.kFew) t.few[at] = places[i];
  }
  __syncthreads();
  if (t.few_count <= t.kFew)
    rank_places<kThreads>(t.few, t.few_count, n, kKeepAll + 1, t.sorted);
  else
    rank_places<kThreads>(places, count, n, b.bound, t.sorted);
  __syncthreads();
}

}  // namespace vocabshard::sm90
