// Any shape and any strides in bf16 and fp16: the same chain by mma.sync, loads element by element. Not made for speed.
#include "sm90/forward_plain.h"
#include "sm90/mma_sync.h"
#include "sm90/plain.cuh"

namespace vocabshard::sm90 {

namespace {

constexpr int kRows = 64, kColumns = 64, kDepthStep = 32, kThreads = 128;
constexpr int kPitch = kDepthStep + 8;  // elements; fragments of a warp fall into different banks
constexpr int kLogitPitch = kColumns + 1;

// rows x kDepthStep elements from (row0, k0) on, zero outside.
VS_DEVICE void load_tile(uint16_t* to, const uint16_t* from, int64_t row_stride, int64_t column_stride, int64_t row0,
                         int64_t rows, int64_t k0, int64_t depth) {
#pragma unroll 4
  for (int i = threadIdx.x; i < 64 * kDepthStep; i += kThreads) {
    const int64_t row = row0 + i / kDepthStep, k = k0 + i % kDepthStep;
    to[i / kDepthStep * kPitch + i % kDepthStep] =
        row < rows && k < depth ? from[row * row_stride + k * column_stride] : uint16_t{0};
  }
}

VS_DEVICE uint32_t pair(const uint16_t* p) { return *reinterpret_cast<const uint32_t*>(p); }

template <class Element, bool kEntropy>
__global__ void __launch_bounds__(kThreads, 4) forward_mma_kernel(const PlainParams p) {
  __shared__ __align__(16) uint16_t hidden[kRows * kPitch], weight[kColumns * kPitch];
  __shared__ float logits[kRows * kLogitPitch];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, q = lane % 4;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kRows;
  const int half = threadIdx.x / kRows;
  const PlainRow row = plain_row(p.work, static_cast<int32_t>(row0 + threadIdx.x % kRows));
  Partial partial = partial_identity();

  const int64_t blocks = (static_cast<int64_t>(p.work.columns) + kColumns - 1) / kColumns;
  const int64_t end = blocks * (blockIdx.y + 1) / gridDim.y;
  for (int64_t block = blocks * blockIdx.y / gridDim.y; block < end; ++block) {
    float acc[kColumns / 8][4] = {};
    for (int64_t k = 0; k < p.depth; k += kDepthStep) {
      __syncthreads();
      load_tile(hidden, static_cast<const uint16_t*>(p.hidden), p.hidden_row, p.hidden_column, row0, p.work.rows, k,
                p.depth);
      load_tile(weight, static_cast<const uint16_t*>(p.weight), p.weight_row, p.weight_column, block * kColumns,
                p.work.columns, k, p.depth);
      __syncthreads();
#pragma unroll
      for (int step = 0; step < kDepthStep; step += 16) {
        const uint16_t* a0 = hidden + (16 * warp + group) * kPitch + step + 2 * q;
        const uint32_t a[4] = {pair(a0), pair(a0 + 8 * kPitch), pair(a0 + 8), pair(a0 + 8 * kPitch + 8)};
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const uint16_t* b0 = weight + (8 * n + group) * kPitch + step + 2 * q;
          const uint32_t b[2] = {pair(b0), pair(b0 + 8)};
          mma<Element>(acc[n], a, b);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        logits[(16 * warp + group + 8 * (i / 2)) * kLogitPitch + 8 * n + 2 * q + i % 2] = acc[n][i];
    __syncthreads();
    for (int tile = 2 * half; tile < 2 * half + 2; ++tile)
      plain_add_tile<kEntropy>(partial, row, logits + threadIdx.x % kRows * kLogitPitch + kTile * tile,
                               block * kColumns + kTile * tile, p.work);
  }
  plain_finish<kEntropy>(partial, row, 2 * blockIdx.y + half, p);
}

template <class Element>
void launch(const PlainParams& p, dim3 grid, bool entropy, cudaStream_t stream) {
  if (entropy)
    forward_mma_kernel<Element, true><<<grid, kThreads, 0, stream>>>(p);
  else
    forward_mma_kernel<Element, false><<<grid, kThreads, 0, stream>>>(p);
}

}  // namespace

PlainShape mma_shape() { return {kRows, kColumns}; }

void launch_mma(const PlainParams& p, bool half_precision, int splits, bool entropy, cudaStream_t stream) {
  const dim3 grid((p.work.rows + kRows - 1) / kRows, splits);
  if (half_precision)
    launch<__half>(p, grid, entropy, stream);
  else
    launch<__nv_bfloat16>(p, grid, entropy, stream);
}

}  // namespace vocabshard::sm90
