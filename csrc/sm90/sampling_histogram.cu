// What a group needs of its ranks between two sums over them: a histogram of radix digits, and the nth of equals.
#include <algorithm>

#include "sampling.h"
#include "sm90/check.h"
#include "sm90/ptx.h"
#include "sm90/sampling_launch.h"

namespace vocabshard::sm90 {

namespace {

constexpr int kThreads = 256, kBins = 1 << 11;
constexpr int64_t kColumnsOfBlock = 1 << 14;  // so many masses of 41 bits, cut in three, fit into 32 bits a piece
constexpr int kPieceBits = 14;

struct Bin {
  uint32_t count, mass[3];
};

struct Digit {
  int shift, bits;
};

__global__ void __launch_bounds__(kThreads)
    histogram_kernel(const __grid_constant__ SamplingHistogram p, Digit digit, int64_t blocks_of_row) {
  __shared__ Bin bins[kBins];
  const int64_t n = blockIdx.x / blocks_of_row, first = blockIdx.x % blocks_of_row * kColumnsOfBlock;
  const int shift = digit.shift, width = digit.bits;
  for (int i = threadIdx.x; i < 1 << width; i += kThreads) bins[i] = Bin{};
  __syncthreads();
  const float* const row = p.logits + n * p.row_stride;
  const float scale = p.scales ? p.scales[n] : p.scale;
  const int64_t cut = p.cut[n], last = min(p.valid, first + kColumnsOfBlock);
  const uint64_t prefix = static_cast<uint64_t>(p.prefix[n]);
  const int32_t k_max = p.k_max[n];
  for (int64_t v = first + threadIdx.x; v < last; v += kThreads) {
    const float z = row[v];
    const uint32_t key = radix_key(z);
    if (place_of(z, p.vocab_start + v) < cut) continue;
    if (p.level > 0 && static_cast<uint64_t>(key) >> (shift + width) != prefix) continue;
    Bin& bin = bins[key >> shift & ((1u << width) - 1)];
    atomicAdd(&bin.count, 1u);
    if (p.masses == nullptr) continue;
    const int64_t mass = mass_of(mul(z, scale), k_max);
    for (int i = 0; i < 3; ++i)
      atomicAdd(&bin.mass[i], static_cast<uint32_t>(mass >> (kPieceBits * i)) & ((1u << kPieceBits) - 1));
  }
  __syncthreads();
  using Word = unsigned long long;
  for (int i = threadIdx.x; i < 1 << width; i += kThreads) {
    const Bin bin = bins[i];
    if (bin.count == 0) continue;
    atomicAdd(reinterpret_cast<Word*>(p.counts) + (n << width) + i, static_cast<Word>(bin.count));
    if (p.masses == nullptr) continue;
    Word mass = 0;
    for (int j = 0; j < 3; ++j) mass += static_cast<Word>(bin.mass[j]) << (kPieceBits * j);
    atomicAdd(reinterpret_cast<Word*>(p.masses) + (n << width) + i, mass);
  }
}

__global__ void __launch_bounds__(kThreads)
    equal_kernel(const float* logits, int64_t row_stride, int64_t valid, int64_t vocab_start, const int64_t* order,
                 const int64_t* nth, int64_t* out) {
  __shared__ int32_t before_warp[kThreads / 32];
  const int64_t n = blockIdx.x, wanted = nth[n];
  const float* const row = logits + n * row_stride;
  if (threadIdx.x == 0) out[n] = -1;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t seen = 0;
  for (int64_t v = threadIdx.x; wanted > seen && v - threadIdx.x < valid; v += kThreads) {
    const bool equal = v < valid && order_of(row[v]) == order[n];
    const unsigned ballot = __ballot_sync(~0u, equal);
    if (lane == 0) before_warp[warp] = __popc(ballot);
    __syncthreads();
    int32_t mine = __popc(ballot & ((1u << lane) - 1)), all = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      mine += w < warp ? before_warp[w] : 0;
      all += before_warp[w];
    }
    if (equal && seen + mine + 1 == wanted) out[n] = vocab_start + v;
    seen += all;
    __syncthreads();
  }
}

}  // namespace

void launch_sampling_histogram(const SamplingHistogram& call, cudaStream_t stream) {
  if (call.rows == 0 || call.valid == 0) return;
  const int64_t blocks_of_row = (call.valid + kColumnsOfBlock - 1) / kColumnsOfBlock;
  histogram_kernel<<<static_cast<unsigned>(call.rows * blocks_of_row), kThreads, 0, stream>>>(
      call, {kRadixShift[call.level], kRadixBits[call.level]}, blocks_of_row);
  check_launch("histogram of a sampling program");
}

void launch_sampling_equal(const float* logits, int64_t row_stride, int64_t rows, int64_t valid, int64_t vocab_start,
                           const int64_t* order, const int64_t* nth, int64_t* out, cudaStream_t stream) {
  if (rows == 0) return;
  equal_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(logits, row_stride, valid, vocab_start, order, nth,
                                                                     out);
  check_launch("equals of a cut");
}

}  // namespace vocabshard::sm90
