// Last of the grids for a top_p (sampling_stream.h): one read of every row lists the candidates for its last kept
// column, sums masses exactly, and races and sums what is better. The last CTA of a row finds the cut and does the
// rest.
#include "sm90/launch.h"
#include "sm90/sampling_columns.cuh"
#include "sm90/sampling_grids.h"

namespace vocabshard::sm90::sampling {

namespace {

constexpr int kThreads = 512;
constexpr int kCollectBytes = sizeof(Candidate) * kListed;

// How CTAs share a row that each of them has a part of.
struct Share {
  int64_t row;  // -1: there is none left for this CTA
  int32_t part, parts, columns;
};

// As launch_bracket leaves rows: all of them.
VS_DEVICE Share share_of_all(int32_t parts, int32_t columns) {
  return {blockIdx.x / parts, static_cast<int32_t>(blockIdx.x % parts), parts, columns};
}

// As launch_count does: those that it has not decided, by all CTAs.
VS_DEVICE Share share_of_left(const Workspace& work, int32_t valid) {
  const auto left = static_cast<uint32_t>(__ldcg(work.words + kLeftWord));
  const uint32_t parts = left == 0 ? 1 : min(gridDim.x / left, static_cast<uint32_t>(kMostParts));
  if (blockIdx.x >= left * parts) return {-1, 0, 0, 0};
  const auto each = static_cast<int32_t>((static_cast<uint32_t>(valid) + kTile * parts - 1) / (kTile * parts)) * kTile;
  return {__ldcg(work.left + blockIdx.x / parts), static_cast<int32_t>(blockIdx.x % parts), static_cast<int32_t>(parts),
          each};
}

// part_columns = 0: of rows that are left.
__global__ void __launch_bounds__(kThreads, 1)
    collect_kernel(const __grid_constant__ SamplingStream call, int32_t part_columns, int32_t parts_of_all) {
  extern __shared__ __align__(128) Candidate list[];
  __shared__ CrossingShared<kThreads> s;
  const SamplingRows& p = call.rows;
  const Workspace work(call.workspace, p.rows);
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  ptx::grid_wait();
  ptx::grid_launch_next();
  const Share share =
      part_columns > 0 ? share_of_all(parts_of_all, part_columns) : share_of_left(work, static_cast<int32_t>(p.valid));
  if (share.row < 0) return;
  const int64_t n = share.row;
  Head& head = work.heads[n];
  const Row row = row_of(p, n);
  if (!head.usable) {
    if (share.part == 0 && threadIdx.x < 32)
      put_row(call, row, target_of(row, target_id_of(p, row.n)), kKeepAll, {{kNoArrival, kNobody}},
              record_load<false>(call.uncut + n, p.rows));
    return;
  }
  const int32_t begin = min(share.part * share.columns, row.columns.valid);
  const int32_t end = min(begin + share.columns, row.columns.valid);
  const float y_max = head.y_max;
  Collected collected(head.bound);
  collect_columns(p, row, head.window, Scales(y_max, row.scale), begin, end, list, kListed, collected, s);
  __syncthreads();

  auto* const listed = reinterpret_cast<Candidate*>(work.candidates + n * kCandidateWords);
  PartOfRow* const all = work.parts + n * kMostParts;
  if (come_together(head, all + share.part, collected, share.parts, list, kListed, listed, s))
    finish_window(call, row, y_max, collected.bound, &head.listed, listed, reinterpret_cast<Waiting*>(list), all,
                  share.parts, s);
}

}  // namespace

void launch_collect(const SamplingStream& call, cudaStream_t stream) {
  const SamplingRows& p = call.rows;
  static OncePerDevice allowed;
  allowed([] {
    check(cudaFuncSetAttribute(collect_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCollectBytes),
          "shared memory of the sampling kernel");
  });
  const auto launch = [&](int64_t blocks, const Parts& parts) {
    launch_behind_shared(collect_kernel, blocks, kThreads, kCollectBytes, stream, call, parts.columns, parts.count);
  };
  if (call.unmerged.partials != nullptr) return launch(multiprocessor_count(), {0, 0});
  const Parts parts = parts_of(p.rows, p.valid, 4 * kThreads, multiprocessor_count());
  launch(p.rows * parts.count, parts);
}

}  // namespace vocabshard::sm90::sampling
