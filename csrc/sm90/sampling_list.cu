// Rows of which a top_k keeps few columns (sampling_stream.h): of the maxima of a row's groups of columns the k-th
// largest bounds its k-th best column from below, and few groups have one that reaches it. A CTA a row reads these
// alone.
//
// What takes time here is that nobody has fetched this code before. So it runs once on a made-up row while the forward
// still runs: a CTA fits beside one of the forward for few rows (merge.cu).
#include <cfloat>

#include "sm90/launch.h"
#include "sm90/sampling_few.cuh"
#include "sm90/sampling_grids.h"

namespace vocabshard::sm90::sampling {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kDepths = 1024, kDepthShift = 17;  // bins of depth d = y_max - y, by the bits of d + 1: 64 an octave
constexpr int kDepthsOfThread = kDepths / kThreads;
constexpr int kAtOnce = 5, kPieces = 8;                                          // float4s of maxima
constexpr uint32_t kMostGroups = sizeof(Bin) * kCrossingBins / sizeof(int32_t);  // in the bins' memory
static_assert(kDepths <= kMostGroups);

using Shared = CrossingShared<kThreads>;

VS_DEVICE int32_t bin_of(float depth) {
  return min(static_cast<int32_t>((bits(add(fmaxf(depth, 0.0f), 1.0f)) - 0x3f800000u) >> kDepthShift), kDepths - 1);
}

// Maxima of groups; -inf past the last. Those of a usual row are read once.
struct Maxima {
  static constexpr int kBatch = 4 * kAtOnce * kThreads;
  const float* at;  // aligned to 16
  int32_t groups;
  float4 v[kAtOnce];

  VS_DEVICE Maxima(const float* at, int32_t groups) : at(at), groups(groups) { load(0); }

  VS_DEVICE float4 four(int32_t group) const {
    if (group + 4 <= groups) return *reinterpret_cast<const float4*>(at + group);
    float4 v = make_float4(neg_inf(), neg_inf(), neg_inf(), neg_inf());
    if (group < groups) v.x = at[group];
    if (group + 1 < groups) v.y = at[group + 1];
    if (group + 2 < groups) v.z = at[group + 2];
    return v;
  }

  VS_DEVICE int32_t group(int32_t start, int i) const {
    return start + 4 * (kThreads * i + static_cast<int32_t>(threadIdx.x));
  }
  VS_DEVICE void load(int32_t start) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) v[i] = four(group(start, i));
  }

  // take(maximum) of all, by all threads
  template <class Take>
  VS_DEVICE void each(const Take& take) {
    each_batch([&](float z) { return take(z), false; }, [](uint32_t, int32_t) {});
  }
  // found(which, start), where has(maximum) of any of a thread's: bit 4 i + j is that of group(start, i) + j.
  template <class Has, class Found>
  VS_DEVICE void each_batch(const Has& has, const Found& found) {
#pragma unroll 1
    for (int32_t start = 0; start < groups; start += kBatch) {
      if (groups > kBatch) load(start);
      uint32_t which = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) which |= has(z[j]) ? 1u << (4 * i + j) : 0;
      }
      if (which != 0) found(which, start);
    }
  }
};

// A y that `wanted` groups reach, or, unless `exact`, the best groups of as many threads; -FLT_MAX where they are
// fewer, or none is near.
VS_DEVICE float bound_of_maxima(Maxima& maxima, float scale, float y_max, int32_t wanted, bool exact, Shared& s) {
  auto* const bins = reinterpret_cast<uint32_t*>(s.bins);
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  for (int i = threadIdx.x; i < kDepths; i += kThreads) bins[i] = 0;
  if (threadIdx.x == 0) s.bin = kDepths - 1;
  __syncthreads();
  const auto count = [&](float z) {
    if (!is_neg_inf(z)) atomicAdd(&bins[bin_of(add(y_max, -mul(z, scale)))], 1u);
  };
  float best = neg_inf();
  maxima.each([&](float z) {
    if (exact) count(z);
    best = fmaxf(best, z);
  });
  if (!exact) count(best);
  __syncthreads();
  int32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kDepthsOfThread; ++i) mine += static_cast<int32_t>(bins[kDepthsOfThread * threadIdx.x + i]);
  int32_t up_to = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == 31) s.words[warp][0] = up_to;
  __syncthreads();
  up_to += __reduce_add_sync(kAllLanes, lane < warp ? static_cast<int32_t>(s.words[lane % kWarps][0]) : 0);
  if (up_to - mine < wanted && wanted <= up_to) {
    int32_t bin = kDepthsOfThread * threadIdx.x, reached = up_to - mine;
    while ((reached += static_cast<int32_t>(bins[bin])) < wanted) ++bin;
    s.bin = bin;
  }
  __syncthreads();
  if (s.bin == kDepths - 1) return -FLT_MAX;
  const float depth = add(from_bits(0x3f800000u + (static_cast<uint32_t>(s.bin + 1) << kDepthShift)), -1.0f);
  return add(add(y_max, -depth), -mul(add(fabsf(y_max), depth), 0x1p-21f));
}

// y_max finite, of `row`. Returns the lowest y of the candidates, which are appended to `list`; s.count of them.
VS_DEVICE float list_best(const Row& row, Maxima& maxima, float y_max, int32_t wanted, int64_t* list, Shared& s) {
  auto* const groups = reinterpret_cast<int32_t*>(s.bins);
  float low;
  uint32_t found;
  bool exact = wanted > kThreads / 2;
#pragma unroll 1
  while (true) {
    low = bound_of_maxima(maxima, row.scale, y_max, wanted, exact, s);
    s.few[threadIdx.x] = kKeepAll;  // before any
    if (threadIdx.x == 0) s.few_count = s.count = 0, s.lowest = INT32_MAX, s.highest = INT32_MIN;
    __syncthreads();
    maxima.each_batch([&](float z) { return mul(z, row.scale) >= low; },
                      [&](uint32_t which, int32_t start) {
                        uint32_t to = atomicAdd(&s.few_count, static_cast<uint32_t>(__popc(which)));
#pragma unroll 1
                        for (; which != 0; which &= which - 1, ++to) {
                          const int32_t bit = __ffs(static_cast<int>(which)) - 1;
                          if (to < kMostGroups) groups[to] = maxima.group(start, bit / 4) + bit % 4;
                        }
                      });
    __syncthreads();
    found = s.few_count;
    if (exact || found <= 4 * static_cast<uint32_t>(wanted)) break;
    exact = true;  // many of the best are of few threads
  }
  const auto pieces = static_cast<int32_t>(16 * min(found, kMostGroups));
#pragma unroll 1
  for (int32_t first = threadIdx.x; first < pieces; first += kPieces * kThreads) {
    const auto column_of = [&](int32_t i) {
      const int32_t piece = first + kThreads * i;
      return piece < pieces ? kMaximaColumns * groups[piece / 16] + 4 * (piece % 16) : row.columns.valid;
    };
    float4 v[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) v[i] = row.columns.four(column_of(i));
    uint32_t which = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) which |= mul(z[j], row.scale) >= low ? 1u << (4 * i + j) : 0;
    }
    if (which == 0) continue;
    uint32_t to = atomicAdd(&s.count, static_cast<uint32_t>(__popc(which)));
#pragma unroll 1
    for (; which != 0; which &= which - 1, ++to) {
      const int32_t bit = __ffs(static_cast<int>(which)) - 1, column = column_of(bit / 4) + bit % 4;
      const float z = row.columns.row[column];
      if (to < kFewPlaces) s.few[to] = place_of(z, row.columns.vocab_start + column);
      if (to < kListed) list[to] = candidate(z, column);
    }
  }
  __syncthreads();
  if (found > kMostGroups && threadIdx.x == 0) s.count = kListed + 1;
  __syncthreads();
  return low;
}

__device__ float made_up[kMaximaColumns];  // columns, all equal, and the maximum of their group

__global__ void __launch_bounds__(kThreads, 6)
    list_kernel(const __grid_constant__ SamplingStream call, int32_t wanted, bool rehearse) {
  __shared__ Shared s;
  const SamplingRows& p = call.rows;
  const Workspace work(call.workspace, p.rows);
  const int64_t n = blockIdx.x;
  int64_t* const list = work.candidates + n * kListed;
  ptx::grid_launch_next();
#pragma unroll 1
  for (int pass = rehearse ? 0 : 1; pass < 2; ++pass) {
    const bool real = pass == 1;
    Row row = {n, {made_up, kMaximaColumns, 0}, 1.0f, 0, false};
    if (real) {
      ptx::grid_wait();
      row = row_of(p, n);
    }
    const float* const of_groups = real ? work.maxima + n * kRowMaxima : made_up;
    Maxima maxima(of_groups, (row.columns.valid + kMaximaColumns - 1) / kMaximaColumns);
    const Partial uncut = real ? uncut_of<kThreads>(call, n, s.of_warp) : Partial{};
    const float y_max = uncut.y_max;
    if (!usable(row, y_max)) {
      if (threadIdx.x == 0) put_row(call, row, kKeepAll, {{kNoArrival, kNobody}}, uncut);
      return;
    }
    const float low = list_best(row, maxima, y_max, real ? wanted : 1, list, s);
    const uint32_t count = s.count;
    if (count <= kFewPlaces && finish_few(call, row, y_max, static_cast<int32_t>(count), s)) continue;
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
  launch_grid(maxima_kernel, call.rows.rows * parts.count, kMaximaThreads, 0, stream, call, parts.columns, parts.count);
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
  const bool waits = call.maxima_there && call.rows.rows <= multiprocessor_count();
  launch_grid(list_kernel, call.rows.rows, kThreads, 0, stream, call, wanted, waits);
}

}  // namespace vocabshard::sm90::sampling
