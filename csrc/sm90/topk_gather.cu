// From the lists that the forward's CTAs made of a row, and the best columns that were known before, to the best of
// all.
#include <stdexcept>

#include "sampling.h"
#include "sm90/check.h"
#include "sm90/ptx.h"
#include "sm90/topk.h"
#include "sm90/topk_collect.cuh"
#include "sm90/topk_gather.h"
#include "sm90/topk_sort.cuh"

namespace vocabshard::sm90 {

namespace {

constexpr int kThreads = 256, kMostPlaces = 2048, kMostLists = 1024, kListsAtATime = 8;

struct Gather {
  int64_t places[kMostPlaces];
  Bound<kThreads> bound;
  TopSort<kThreads> sort;
  int32_t group[kMostLists];
  int32_t length[kMostLists];
  int32_t count, total;
};

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const TopkLists top, const Schedule schedule, const RowWork work, int64_t* best) {
  constexpr int kMBlocks = kShape128.m_blocks;
  extern __shared__ __align__(16) char memory[];
  Gather& s = *reinterpret_cast<Gather*>(memory);
  const auto thread = static_cast<int32_t>(threadIdx.x), row = static_cast<int32_t>(blockIdx.x), n = top.n;
  const int32_t block = row / (64 * kMBlocks), in_block = row % (64 * kMBlocks);
  const int32_t r = 2 * (in_block / 64) + in_block % 16 / 8, warp = in_block % 64 / 16, lane = in_block % 8 * 4;
  const int32_t unit = schedule.share_columns ? block / 2 : block, ctas = schedule.share_columns ? 1 : 2;
  ptx::grid_wait();
  const int32_t first = first_cluster(schedule, unit), last = last_cluster(schedule, unit);
  const int32_t lists = 4 * ctas * (last - first + 1);
  if (thread == 0) s.count = n, s.total = 0;
  __syncthreads();
  int32_t mine = 0;
  for (int32_t i = thread; i < lists; i += kThreads) {
    const int32_t cluster = first + i / 4 / ctas, rank = schedule.share_columns ? block % 2 : i / 4 % 2;
    const int32_t home = first_unit(schedule, cluster);
    s.group[i] = (((2 * cluster + rank) * places(schedule) + (unit - home)) * 4 + warp) * (2 * kMBlocks) + r;
    mine += s.length[i] = top.states[s.group[i] * int64_t{32} + lane + i % 4].count;
  }
  mine = __reduce_add_sync(~0u, mine);
  if (thread % 32 == 0 && mine != 0) atomicAdd(&s.total, mine);
  for (int32_t i = thread; i < n; i += kThreads) s.places[i] = top.best[int64_t{row} * n + i];
  __syncthreads();
  // all at a time where there is room, as there is in all but odd rows
  const int32_t step = n + s.total <= kMostPlaces ? lists : kListsAtATime;
  for (int32_t begin = 0; begin < lists; begin += step) {
    const int32_t some = min(step, lists - begin), apart = max(kThreads / some, 1);
    for (int32_t i = thread; i < some * apart; i += kThreads) {
      const int32_t list = begin + i % some;
      const int2* const entries = top.lists + s.group[list] * (int64_t{32} * top.capacity) + lane + list % 4;
      for (int32_t k = i / some; k < s.length[list]; k += apart) {
        const int64_t place = entry_place(entries[k * 32], work);
        if (place != kKeepAll) s.places[atomicAdd(&s.count, 1)] = place;
      }
    }
    __syncthreads();
    sort_best(s.sort, s.bound, s.places, s.count, n);
    if (step == lists) break;
    for (int32_t i = thread; i < n; i += kThreads) s.places[i] = s.sort.sorted[i];
    if (thread == 0) s.count = n;
    __syncthreads();
  }
  for (int32_t i = thread; i < n; i += kThreads) best[int64_t{row} * n + i] = s.sort.sorted[i];
}

}  // namespace

int64_t topk_lists_bytes(const Schedule& schedule, int32_t n) {
  const ListShape shape = list_shape(schedule, n);
  return shape.states + shape.lists + shape.scratch;
}

TopkLists topk_lists(const Schedule& schedule, const TopkRows& top, void* workspace) {
  const ListShape shape = list_shape(schedule, top.n);
  auto* const at = static_cast<char*>(workspace);
  TopkLists lists = {};
  lists.n = top.n, lists.limit = shape.limit, lists.capacity = shape.capacity;
  lists.best = top.best, lists.place = top.place;
  lists.before = reinterpret_cast<unsigned long long*>(top.before);
  lists.states = reinterpret_cast<ListState*>(at);
  lists.lists = reinterpret_cast<int2*>(at + shape.states);
  lists.scratch = reinterpret_cast<int2*>(at + shape.states + shape.lists);
  return lists;
}

void launch_topk_gather(const WgmmaParams& p, int64_t* best, cudaStream_t stream) {
  static_assert(kMostTop + kListsAtATime * (kMostLimit + kListTile) <= kMostPlaces);
  if (p.schedule.clusters * 8 > kMostLists)
    throw std::invalid_argument("topk: more multiprocessors than were thought of");
  static OncePerDevice allowed;
  allowed([] {
    check(cudaFuncSetAttribute(gather_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Gather)),
          "shared memory of the lists");
  });
  cudaLaunchAttribute behind = {};
  behind.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  behind.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.work.rows));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Gather);
  config.stream = stream;
  config.attrs = &behind;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, gather_kernel, p.top, p.schedule, p.work, best), "the best of lists");
}

}  // namespace vocabshard::sm90
