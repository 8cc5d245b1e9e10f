// Last of three grids (sampling_stream.h), where a top_p's cut may keep many columns: draws a token and sums what is
// kept. And what decides whether the three are taken.
#include <algorithm>

#include "sm90/launch.h"
#include "sm90/sampling_grids.h"
#include "sm90/sampling_race.cuh"

namespace vocabshard::sm90 {

namespace sampling {

namespace {

constexpr int kThreads = kRaceThreads, kWarps = kThreads / 32, kBlocks = 3;  // of a multiprocessor

template <bool kDraw>
__global__ void __launch_bounds__(kThreads, kBlocks)
    race_kernel(const __grid_constant__ SamplingStream call, int32_t part_columns, int32_t parts) {
  __shared__ int64_t words[kWarps][kLimbs];
  __shared__ bool last;
  const SamplingRows& p = call.rows;
  const int64_t n = blockIdx.x / parts;
  const int32_t part = static_cast<int32_t>(blockIdx.x % parts);
  const Workspace work(call.workspace, p.rows);
  Head& head = work.heads[n];
  ptx::grid_wait();
  if (!head.usable) return;
  const Columns columns(p, n);
  const int64_t cut = head.cut;
  const int32_t begin = part * part_columns, end = min(columns.valid, begin + part_columns);
  Race race;
  race_over<kDraw>(call, n, columns, head, cut, begin, end, kWarps, race);
  PartOfRow all = part_of_row<kWarps>(words, race);
  PartOfRow* const of_row = work.parts + n * kMostParts;
  if (threadIdx.x == 0) {
    of_row[part] = all;
    __threadfence();
    last = atomicAdd(&head.finished, 1u) + 1 == static_cast<uint32_t>(parts);
  }
  __syncthreads();
  if (!last || threadIdx.x >= 32) return;
  __threadfence();
  Words<2> first = {{kNoArrival, kNobody}};
  Words<kLimbs> sums = {{0, 0, 0}};
  for (int32_t i = threadIdx.x; i < parts; i += 32) {
    const int64_t* const one = &of_row[i].arrival;
    first = Smaller()(first, Words<2>{{__ldcg(one), __ldcg(one + 1)}});
    sums = Sum()(sums, Words<kLimbs>{{__ldcg(one + 2), __ldcg(one + 3), __ldcg(one + 4)}});
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    first = Smaller()(first, of_lane(first, step));
    sums = Sum()(sums, of_lane(sums, step));
  }
  if (threadIdx.x == 0) put_row(call, n, true, cut, first, head.y_max, sums.x);
}

}  // namespace

void launch_race(const SamplingStream& call, cudaStream_t stream) {
  const SamplingRows& p = call.rows;
  const Parts parts = parts_of(p.rows, p.valid, 512, kBlocks * multiprocessor_count());
  launch_grid(p.draw ? race_kernel<true> : race_kernel<false>, p.rows * parts.count, kThreads, 0, stream, call,
              parts.columns, parts.count);
}

Parts parts_of(int64_t rows, int64_t valid, int64_t granule, int64_t slots) {
  const int64_t granules = (valid + granule - 1) / granule;
  // at once, or in many small waves
  const int64_t wished = slots >= 3 * rows ? slots / rows : (6 * slots + rows - 1) / rows;
  const int64_t most = std::min<int64_t>({kMostParts, granules, wished});
  const int64_t each = (granules + most - 1) / most;
  return {static_cast<int32_t>(each * granule), static_cast<int32_t>((granules + each - 1) / each)};
}

}  // namespace sampling

int64_t sampling_stream_row_bytes() { return sampling::kRowBytes; }

bool streams_rows(const SamplingRows& call) {
  const bool vectors = reinterpret_cast<uintptr_t>(call.logits) % 16 == 0 && call.row_stride % 4 == 0;
  if (!call.whole || !vectors || call.vocab_start % 4 != 0 || call.given_cut != nullptr || call.best_count > 0 ||
      call.cut == nullptr || call.place != nullptr || call.maxima != nullptr || call.records == nullptr ||
      call.records_there || call.valid < 1 || call.valid > kStreamedColumns ||
      call.vocab_start + call.valid > kEveryTie)
    return false;
  bool few = false;  // kept
  for (int k = 0; k < call.steps; ++k) {
    const SamplingStep& step = call.step[k];
    if (step.kind == kGreedy || (!step.scaled && (call.scales != nullptr || call.scale != 1.0f))) return false;
    if (step.kind == kTopK) {
      if (!few && step.number > kStreamedK) return false;
      few = true;
    }
    if (step.kind == kTopP && !few) return call.steps == 1;
  }
  return few;
}

void launch_sampling_stream(const SamplingStream& call, cudaStream_t stream) {
  if (call.rows.rows == 0) return;
  sampling::launch_bracket(call, stream);
  sampling::launch_collect(call, stream);
  if (call.rows.steps == 1 && call.rows.step[0].kind == kTopP) sampling::launch_race(call, stream);
}

}  // namespace vocabshard::sm90
