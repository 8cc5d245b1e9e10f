// Rows of which few columns are kept (sampling_stream.h). Of the maxima of a row's groups of columns the k-th largest
// bounds its k-th best column from below, and few groups have a column that reaches it. A CTA a row reads these alone.
//
// What takes time here is that nobody has fetched this code before. So it runs once on a made-up row while the forward
// still runs: a CTA fits beside one of the forward for few rows (merge.cu).
#include "sm90/launch.h"
#include "sm90/sampling_grids.h"
#include "sm90/sampling_maxima.cuh"

namespace vocabshard::sm90::sampling {

namespace {

__device__ __align__(16) float made_up[kMaximaColumns];  // columns, all equal, and the maximum of their group

// `wanted`: of the top_k that comes first.
__global__ void __launch_bounds__(kFewThreads, 6)
    list_kernel(const __grid_constant__ SamplingStream call, int32_t wanted) {
  __shared__ FewShared s;
  const SamplingRows& p = call.rows;
  const Workspace work(call.workspace, p.rows);
  const int64_t n = blockIdx.x;
  int64_t* const list = work.candidates + n * kCandidateWords;
  ptx::grid_launch_next();
#pragma unroll 1
  for (int pass = call.maxima_there && __syncthreads_or(work.early(call.unmerged.schedule.clusters / 2)) ? 0 : 1;
       pass < 2; ++pass) {
    const bool real = pass == 1;
    Row row = {n, {made_up, kMaximaColumns, 0}, 1.0f, 0, false};
    if (real) {
      ptx::grid_wait();
      row = row_of(p, n);
    }
    const float* const of_groups = real ? work.maxima + n * kRowMaxima : made_up;
    Maxima maxima(of_groups, (row.columns.valid + kMaximaColumns - 1) / kMaximaColumns);
    const Partial uncut = real ? uncut_of<kFewThreads>(call, n, s.of_warp) : Partial{};
    const float y_max = uncut.y_max;
    if (!usable(row, y_max)) {
      if (threadIdx.x < 32)
        put_row(call, row, target_of(row, target_id_of(p, row.n)), kKeepAll, {{kNoArrival, kNobody}}, uncut);
      return;
    }
    float low;
    const uint32_t count = list_best(row, maxima, y_max, real ? wanted : 1, list, low, s);
    if (count > kFewPlaces || !finish_few(call, row, y_max, static_cast<int32_t>(count), {0, 0}, s))
      finish_row(call, row, y_max, low, count, list, s);
  }
}

constexpr int kMaximaThreads = 256, kMaximaPieces = 4;

// Of logits that came without.
__global__ void __launch_bounds__(kMaximaThreads)
    maxima_kernel(const __grid_constant__ SamplingStream call, int32_t part_columns, int32_t parts) {
  const SamplingRows& p = call.rows;
  const int64_t n = blockIdx.x / parts;
  const int32_t begin = static_cast<int32_t>(blockIdx.x % parts) * part_columns;
  ptx::grid_wait();
  ptx::grid_launch_next();
  const Columns columns = columns_of(p, n);
  float* const to = Workspace(call.workspace, p.rows).maxima + n * kRowMaxima;
  const int32_t end = min(columns.valid, begin + part_columns);
  for (int32_t block = begin; block < end; block += 4 * kMaximaPieces * kMaximaThreads) {
    float most[kMaximaPieces];
#pragma unroll
    for (int i = 0; i < kMaximaPieces; ++i) {
      const int32_t at = block + 4 * (kMaximaThreads * i + static_cast<int32_t>(threadIdx.x));
      most[i] = largest(columns.four(at < end ? at : columns.valid));
    }
#pragma unroll
    for (int i = 0; i < kMaximaPieces; ++i) {
      const int32_t at = block + 4 * (kMaximaThreads * i + static_cast<int32_t>(threadIdx.x));
#pragma unroll
      for (int step = 8; step > 0; step /= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(kAllLanes, most[i], step));
      if (threadIdx.x % 16 == 0 && at < end) to[at / kMaximaColumns] = most[i];
    }
  }
}

}  // namespace

void launch_maxima(const SamplingStream& call, cudaStream_t stream) {
  const int64_t granule = 4 * kMaximaPieces * kMaximaThreads, slots = 8 * multiprocessor_count();
  const Parts parts = parts_of(call.rows.rows, call.rows.valid, granule, slots);
  launch_behind(maxima_kernel, call.rows.rows * parts.count, kMaximaThreads, stream, call, parts.columns, parts.count);
}

void launch_list(const SamplingStream& call, cudaStream_t stream) {
  const SamplingStep* step = call.rows.step;
  while (step->kind == kMinP) ++step;
  const auto wanted = static_cast<int32_t>(step->number < call.rows.valid ? step->number : call.rows.valid);
  static OncePerDevice once;
  once([] {  // as the forward has it: an SM that is to be set otherwise must run empty first
    check(cudaFuncSetAttribute(list_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "shared memory of the sampling kernel");
  });
  launch_behind(list_kernel, call.rows.rows, kFewThreads, stream, call, wanted);
}

}  // namespace vocabshard::sm90::sampling
