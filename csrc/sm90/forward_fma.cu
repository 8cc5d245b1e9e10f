// fp32: one correctly rounded FMA chain per logit, ascending k, from +0. Projection fma-chain, the CPU's bytes.
// 128 x 128 logits a CTA, 8 x 8 a thread, 16 elements of k at a time in two buffers.
#include "sm90/forward_plain.h"
#include "sm90/plain.cuh"

namespace vocabshard::sm90 {

namespace {

constexpr int kRows = 128, kColumns = 128, kStep = 16, kThreads = 256;
constexpr int kPitch = 132;  // floats of one k; a multiple of 4 for 16-byte reads
constexpr int kPass = 32;    // columns that go through shared memory at a time
constexpr int kPassPitch = kPass + 1;
constexpr int kBuffer = kStep * kPitch;
static_assert(kRows * kPassPitch <= 4 * kBuffer, "logits reuse the operands' buffers");

struct Operand {
  const float* from;
  int64_t row_stride, column_stride, rows, depth;
  bool wide;  // 16-byte loads along k
};

// Thread t takes rows t / 4 and t / 4 + 64, four elements of k from 4 (t % 4) on.
VS_DEVICE void fetch(float (&x)[2][4], const Operand& operand, int64_t row0, int64_t k0) {
  const int64_t k = k0 + threadIdx.x % 4 * 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = row0 + threadIdx.x / 4 + 64 * i;
    const float* at = operand.from + row * operand.row_stride + k * operand.column_stride;
    if (operand.wide && row < operand.rows && k + 4 <= operand.depth) {
      const float4 v = *reinterpret_cast<const float4*>(at);
      x[i][0] = v.x, x[i][1] = v.y, x[i][2] = v.z, x[i][3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        x[i][j] = row < operand.rows && k + j < operand.depth ? at[j * operand.column_stride] : 0.0f;
    }
  }
}

VS_DEVICE void put(float* to, const float (&x)[2][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) to[(threadIdx.x % 4 * 4 + j) * kPitch + threadIdx.x / 4 + 64 * i] = x[i][j];
}

VS_DEVICE void read8(float (&x)[8], const float* at) {
  const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + 64);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

VS_DEVICE void chain_step(float (&acc)[8][8], const float* hidden, const float* weight) {
  float a[8], b[8];
  read8(a, hidden + threadIdx.x / 16 * 4);
  read8(b, weight + threadIdx.x % 16 * 4);
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) acc[i][j] = fma(a[i], b[j], acc[i][j]);
}

template <bool kEntropy>
__global__ void __launch_bounds__(kThreads, 2) forward_fma_kernel(const PlainParams p) {
  __shared__ __align__(16) float buffer[4 * kBuffer];  // hidden 0, hidden 1, weight 0, weight 1
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kRows;
  const auto aligned = [](const void* at, int64_t row_stride, int64_t column_stride) {
    return column_stride == 1 && row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(at) % 16 == 0;
  };
  const Operand hidden = {static_cast<const float*>(p.hidden),
                          p.hidden_row,
                          p.hidden_column,
                          p.work.rows,
                          p.depth,
                          aligned(p.hidden, p.hidden_row, p.hidden_column)};
  const Operand weight = {static_cast<const float*>(p.weight),
                          p.weight_row,
                          p.weight_column,
                          p.work.columns,
                          p.depth,
                          aligned(p.weight, p.weight_row, p.weight_column)};
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16, half = threadIdx.x / kRows;
  __shared__ Partial partials[kThreads];  // not in registers: the chains fill them
  partials[threadIdx.x] = partial_identity();

  const int64_t blocks = (static_cast<int64_t>(p.work.columns) + kColumns - 1) / kColumns;
  const int64_t end = blocks * (blockIdx.y + 1) / gridDim.y;
  for (int64_t block = blocks * blockIdx.y / gridDim.y; block < end; ++block) {
    float acc[8][8] = {}, a[2][4], b[2][4];
    fetch(a, hidden, row0, 0);
    fetch(b, weight, block * kColumns, 0);
    int turn = 0;
    for (int64_t k = 0; k < p.depth; k += kStep, turn ^= 1) {
      float* to_hidden = buffer + turn * kBuffer;
      float* to_weight = buffer + (2 + turn) * kBuffer;
      put(to_hidden, a);
      put(to_weight, b);
      __syncthreads();
      if (k + kStep < p.depth) {
        fetch(a, hidden, row0, k + kStep);
        fetch(b, weight, block * kColumns, k + kStep);
      }
      if (k + kStep <= p.depth) {
#pragma unroll
        for (int step = 0; step < kStep; ++step) chain_step(acc, to_hidden + step * kPitch, to_weight + step * kPitch);
      } else {  // no zeros are added beyond the depth: -0 + 0 is +0
        for (int step = 0; step < p.depth - k; ++step)
          chain_step(acc, to_hidden + step * kPitch, to_weight + step * kPitch);
      }
    }
#pragma unroll
    for (int pass = 0; pass < kColumns / kPass; ++pass) {
      __syncthreads();
      if (tx / 8 == pass % 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            buffer[(i / 4 * 64 + ty * 4 + i % 4) * kPassPitch + tx % 8 * 4 + j] = acc[i][pass / 2 * 4 + j];
      }
      __syncthreads();
      const PlainRow row = plain_row(p.work, static_cast<int32_t>(row0 + threadIdx.x % kRows));
      Partial partial = partials[threadIdx.x];
      plain_add_tile<kEntropy>(partial, row, buffer + threadIdx.x % kRows * kPassPitch + kTile * half,
                               block * kColumns + pass * kPass + kTile * half, p.work);
      partials[threadIdx.x] = partial;
    }
    __syncthreads();
  }
  plain_finish<kEntropy>(partials[threadIdx.x], plain_row(p.work, static_cast<int32_t>(row0 + threadIdx.x % kRows)),
                         2 * blockIdx.y + half, p);
}

}  // namespace

PlainShape fma_shape() { return {kRows, kColumns}; }

void launch_fma(const PlainParams& p, int splits, bool entropy, cudaStream_t stream) {
  const dim3 grid((p.work.rows + kRows - 1) / kRows, splits);
  if (entropy)
    forward_fma_kernel<true><<<grid, kThreads, 0, stream>>>(p);
  else
    forward_fma_kernel<false><<<grid, kThreads, 0, stream>>>(p);
}

}  // namespace vocabshard::sm90
