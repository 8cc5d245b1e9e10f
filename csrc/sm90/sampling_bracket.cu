// First of two grids for a top_p (sampling_stream.h): from a sample of each row, which columns may be the last that is
// kept.
//
// Nothing here decides: the next grid sees whether the crossing is among the candidates, and takes a slower way where
// it is not. So estimates are fp32 and need no order.
#include <cfloat>

#include "sm90/sampling_grids.h"
#include "sm90/sampling_race.cuh"

namespace vocabshard::sm90::sampling {

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kBins = 8192, kBinsOfThread = kBins / kThreads;
constexpr int kBinShift = 14;                    // bins of depth d = y_max - y, by the bits of d + 1: 512 an octave
constexpr int kPieces = 5;                       // float4s that a thread loads at once
constexpr float kSigmas = 4.0f, kBias = 0.004f;  // of an estimated mass; a quarter of a bin's width
constexpr float kUnseen = 10.0f;                 // times the stride: as many columns the sample does not miss

VS_DEVICE float depth_of(int32_t bin) {
  return add(from_bits(0x3f800000u + (static_cast<uint32_t>(bin) << kBinShift)), -1.0f);
}
VS_DEVICE int32_t bin_of(float depth) {
  return min(static_cast<int32_t>((bits(add(fmaxf(depth, 0.0f), 1.0f)) - 0x3f800000u) >> kBinShift), kBins - 1);
}
VS_DEVICE float weight_at(float depth) { return ptx::exp2(-mul(depth, kLog2e)); }

struct Sums {
  float mass, squares;
};

__global__ void __launch_bounds__(kThreads, 1)
    bracket_kernel(const __grid_constant__ SamplingStream call, int32_t stride, float left_out) {
  __shared__ uint32_t bins[kBins];
  __shared__ Sums of_warp[kWarps];
  __shared__ int64_t best_of_warp[kWarps];
  __shared__ int32_t crossing[2];
  const SamplingRows& p = call.rows;
  const int64_t n = blockIdx.x;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
  if (threadIdx.x < 2) crossing[threadIdx.x] = threadIdx.x == 0 ? kBins - 1 : 0;
  __syncthreads();
  ptx::grid_wait();
  ptx::grid_launch_next();

  Head& head = Workspace(call.workspace, p.rows).heads[n];
  const Partial uncut = record_load<false>(call.uncut + n, p.rows);
  const float scale = scale_of(p, n), y_max = uncut.y_max;
  if (!in_range(y_max) || is_nan(scale)) {
    if (threadIdx.x == 0) head.usable = false;
    return;
  }
  const Columns columns = columns_of(p, n);
  const int32_t strata = (columns.valid + 8 * stride - 1) / (8 * stride), pieces = 2 * strata;
  float best = neg_inf();
  int32_t best_at = 0;
  for (int32_t base = threadIdx.x; base < pieces; base += kPieces * kThreads) {
    float4 v[kPieces];
    int32_t at[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int32_t piece = base + kThreads * i, stratum = piece / 2;
      const auto jitter = static_cast<int32_t>((static_cast<uint32_t>(stratum) * 0x9e3779b1u) >> 20) & (stride - 1);
      at[i] = piece < pieces ? 8 * (stratum * stride + jitter) + 4 * (piece & 1) : columns.valid;
      v[i] = columns.four(at[i]);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (is_neg_inf(z[j])) continue;
        atomicAdd(&bins[bin_of(add(y_max, -mul(z[j], scale)))], 1u);
        if (z[j] > best) best = z[j], best_at = at[i] + j;
      }
    }
  }
  int64_t place = is_neg_inf(best) ? kKeepAll : place_of(best, columns.vocab_start + best_at);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) place = max(place, __shfl_xor_sync(kAllLanes, place, step));
  if (lane == 0) best_of_warp[warp] = place;
  __syncthreads();

  // from the deepest bin up
  Sums mine = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kBinsOfThread; ++i) {
    const int32_t bin = kBins - 1 - (kBinsOfThread * static_cast<int32_t>(threadIdx.x) + i);
    const auto count = static_cast<float>(bins[bin]);
    const float w = weight_at(mul(add(depth_of(bin), depth_of(bin + 1)), 0.5f));
    mine.mass += count * w;
    mine.squares += count * w * w;
  }
  Sums before = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float mass = __shfl_up_sync(kAllLanes, before.mass, step);
    const float squares = __shfl_up_sync(kAllLanes, before.squares, step);
    if (lane >= step) before.mass += mass, before.squares += squares;
  }
  if (lane == 31) of_warp[warp] = before;
  before.mass = __shfl_up_sync(kAllLanes, before.mass, 1);
  before.squares = __shfl_up_sync(kAllLanes, before.squares, 1);
  if (lane == 0) before = {0.0f, 0.0f};
  __syncthreads();
  {
    Sums other = lane < warp ? of_warp[lane] : Sums{0.0f, 0.0f};
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      other.mass += __shfl_xor_sync(kAllLanes, other.mass, step);
      other.squares += __shfl_xor_sync(kAllLanes, other.squares, step);
    }
    before.mass += other.mass, before.squares += other.squares;
  }
  const auto each = static_cast<float>(stride);
  const float rest = total_of(uncut) * left_out;
  int32_t shallow = 0, deep = kBins - 1;
#pragma unroll
  for (int i = 0; i < kBinsOfThread; ++i) {
    const int32_t bin = kBins - 1 - (kBinsOfThread * static_cast<int32_t>(threadIdx.x) + i);
    const auto count = static_cast<float>(bins[bin]);
    const float w = weight_at(mul(add(depth_of(bin), depth_of(bin + 1)), 0.5f)), deeper = each * before.mass;
    const float error = kSigmas * each * sqrtf(before.squares * (1.0f - 1.0f / each));
    const float unseen = stride > 1 ? kUnseen * each * weight_at(depth_of(bin)) : 0.0f;
    if (deeper * (1.0f + kBias) + error + unseen <= rest) deep = min(deep, bin);
    if (deeper * (1.0f - kBias) - error > rest) shallow = max(shallow, bin + 1);  // too much is deeper
    before.mass += count * w;
    before.squares += count * w * w;
  }
  deep = __reduce_min_sync(kAllLanes, deep);
  shallow = __reduce_max_sync(kAllLanes, shallow);
  if (lane == 0) {
    atomicMin(&crossing[0], deep);
    atomicMax(&crossing[1], shallow);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    deep = crossing[0], shallow = crossing[1];
    const float depth = depth_of(deep + 1), slack = (fabsf(y_max) + depth) * 0x1p-21f;
    head.y_max = y_max;
    head.window = {deep == kBins - 1 ? -FLT_MAX : y_max - depth - slack,  // -inf is no candidate
                   shallow == 0 ? -neg_inf() : y_max - depth_of(shallow) + slack};
    // where logits are clamped, masses need more care than the next grid takes
    head.listed = y_max < -kLogitLimit + 256.0f ? kListed + 1 : 0;
    head.collected = 0;
    head.usable = true;
  }
  if (!p.draw || warp != 0) return;
  place = best_of_warp[lane % kWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) place = max(place, __shfl_xor_sync(kAllLanes, place, step));
  if (lane != 0) return;
  // the best column of the sample: infinite unless it is kept for sure
  head.bound = from_bits(0x7f800000u);
  const float z = logit_of(static_cast<int32_t>(place >> 32));
  if (place == kKeepAll || !(mul(z, scale) > head.window.high)) return;
  const int64_t id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place)), row = p.row_keys[n];
  const float clock = clock_at(column_word(id, 0, p.seed, row), id, p.seed, row);
  head.bound = bound_of(clock, Terms(y_max, scale)(z, true));
}

}  // namespace

void launch_bracket(const SamplingStream& call, cudaStream_t stream) {
  const SamplingRows& p = call.rows;
  int32_t stride = 1;
  while (stride < 8 && p.valid > 16384 * 2 * stride) stride *= 2;
  const auto left_out = static_cast<float>(1.0 - static_cast<double>(p.step[0].number) * 0x1p-30);
  launch_behind(bracket_kernel, p.rows, kThreads, stream, call, stride, left_out);
}

}  // namespace vocabshard::sm90::sampling
