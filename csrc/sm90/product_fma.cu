// out += A @ B in fp32, an FMA chain an element: 16 kT x 16 kT of out a CTA, kT x kT a thread, 16 elements of k at a
// time in two buffers. Where blocks of 128 x 128 are fewer than two a multiprocessor they are of 64 x 64.
#include <stdexcept>

#include "contract.h"
#include "sm90/check.h"
#include "sm90/launch.h"
#include "sm90/product_fma.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

namespace {

constexpr int kStep = 16, kThreads = 256;

// kStep elements of k by 16 kT rows or columns of out, `side` of which exist. kAlongSide: the four elements of a load
// lie along the side, else along k; `stride` is that of the other direction.
template <int kT, bool kAlongSide>
struct Operand {
  static constexpr int kSide = 16 * kT, kPitch = kSide + 4, kQuads = kSide * kStep / 4 / kThreads;
  const float* from;
  int64_t stride, depth, side;
  bool wide;  // 16 bytes a load

  static VS_DEVICE int side_at(int i) {
    const int quad = ptx::thread() + i * kThreads;
    return kAlongSide ? quad % (kSide / 4) * 4 : quad / (kStep / 4);
  }
  static VS_DEVICE int k_at(int i) {
    const int quad = ptx::thread() + i * kThreads;
    return kAlongSide ? quad / (kSide / 4) : quad % (kStep / 4) * 4;
  }
  VS_DEVICE void fetch(float (&x)[kQuads][4], int64_t side0, int64_t k0) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int64_t s = side0 + side_at(i), k = k0 + k_at(i);
      const float* at = kAlongSide ? from + k * stride + s : from + s * stride + k;
      const int64_t left = s < side && k < depth ? (kAlongSide ? side - s : depth - k) : 0;
      if (wide && left >= 4) {
        const float4 v = __ldg(reinterpret_cast<const float4*>(at));
        x[i][0] = v.x, x[i][1] = v.y, x[i][2] = v.z, x[i][3] = v.w;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] = j < left ? at[j] : 0.0f;
      }
    }
  }
  static VS_DEVICE void put(float* to, const float (&x)[kQuads][4]) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      float* at = to + k_at(i) * kPitch + side_at(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) at[j * (kAlongSide ? 1 : kPitch)] = x[i][j];
    }
  }
};

// A thread's rows or columns: four beside each other in each 64.
template <int kT>
VS_DEVICE int place(int thread, int i) {
  return i / 4 * 64 + thread * 4 + i % 4;
}

template <int kT>
VS_DEVICE void chain_step(float (&acc)[kT][kT], const float* a, const float* b) {
  float x[kT], y[kT];
#pragma unroll
  for (int i = 0; i < kT; i += 4) {
    const float4 u = *reinterpret_cast<const float4*>(a + place<kT>(threadIdx.x / 16, i));
    const float4 v = *reinterpret_cast<const float4*>(b + place<kT>(threadIdx.x % 16, i));
    x[i] = u.x, x[i + 1] = u.y, x[i + 2] = u.z, x[i + 3] = u.w;
    y[i] = v.x, y[i + 1] = v.y, y[i + 2] = v.z, y[i + 3] = v.w;
  }
#pragma unroll
  for (int i = 0; i < kT; ++i)
#pragma unroll
    for (int j = 0; j < kT; ++j) acc[i][j] = fma(x[i], y[j], acc[i][j]);
}

template <int kT, bool kTransposedA>
__global__ void __launch_bounds__(kThreads, 2) product_fma(const FmaProductCall p) {
  using Side = Operand<kT, true>;
  constexpr int kBuffer = kStep * Side::kPitch;
  __shared__ __align__(16) float buffer[4 * kBuffer];  // A 0, A 1, B 0, B 1
  const int64_t row0 = static_cast<int64_t>(blockIdx.y) * Side::kSide;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x) * Side::kSide;
  const auto aligned = [](const void* at, int64_t stride) {
    return stride % 4 == 0 && reinterpret_cast<uintptr_t>(at) % 16 == 0;
  };
  const int64_t a_stride = kTransposedA ? p.a_column : p.a_row;
  const Operand<kT, kTransposedA> left = {p.a, a_stride, p.depth, p.rows, aligned(p.a, a_stride)};
  const Side right = {p.b, p.b_row, p.depth, p.columns, aligned(p.b, p.b_row)};

  float acc[kT][kT], a[Side::kQuads][4], b[Side::kQuads][4];
#pragma unroll
  for (int i = 0; i < kT; ++i)
#pragma unroll
    for (int j = 0; j < kT; ++j) {
      const int64_t r = row0 + place<kT>(ptx::thread() / 16, i), c = column0 + place<kT>(ptx::thread() % 16, j);
      acc[i][j] = r < p.rows && c < p.columns ? p.out[r * p.out_row + c] : 0.0f;
    }
  left.fetch(a, row0, 0);
  right.fetch(b, column0, 0);
  int turn = 0;
  for (int64_t k = 0; k < p.depth; k += kStep, turn ^= 1) {
    float* to_a = buffer + turn * kBuffer;
    float* to_b = buffer + (2 + turn) * kBuffer;
    left.put(to_a, a);
    right.put(to_b, b);
    __syncthreads();
    if (k + kStep < p.depth) {
      left.fetch(a, row0, k + kStep);
      right.fetch(b, column0, k + kStep);
    }
    if (k + kStep <= p.depth) {
#pragma unroll
      for (int step = 0; step < kStep; ++step)
        chain_step<kT>(acc, to_a + step * Side::kPitch, to_b + step * Side::kPitch);
    } else {  // no zeros are added beyond the depth: -0 + 0 is +0
      for (int step = 0; step < p.depth - k; ++step)
        chain_step<kT>(acc, to_a + step * Side::kPitch, to_b + step * Side::kPitch);
    }
  }
#pragma unroll
  for (int i = 0; i < kT; ++i)
#pragma unroll
    for (int j = 0; j < kT; ++j) {
      const int64_t r = row0 + place<kT>(ptx::thread() / 16, i), c = column0 + place<kT>(ptx::thread() % 16, j);
      if (r < p.rows && c < p.columns) p.out[r * p.out_row + c] = acc[i][j];
    }
}

}  // namespace

void launch_fma_product(const FmaProductCall& call, cudaStream_t stream) {
  if (call.a_row != 1 && call.a_column != 1)
    throw std::invalid_argument("A must have its rows or its columns side by side");
  if (call.rows == 0 || call.depth == 0 || call.columns == 0) return;
  const auto blocks = [&](int64_t side) {
    return dim3(static_cast<unsigned>((call.columns + side - 1) / side),
                static_cast<unsigned>((call.rows + side - 1) / side));
  };
  const auto launch = [&](auto large, auto small) {
    const dim3 grid = blocks(128);
    if (static_cast<int64_t>(grid.x) * grid.y >= 2 * multiprocessor_count())
      large<<<grid, kThreads, 0, stream>>>(call);
    else
      small<<<blocks(64), kThreads, 0, stream>>>(call);
  };
  if (call.a_column == 1)
    launch(product_fma<8, false>, product_fma<4, false>);
  else
    launch(product_fma<8, true>, product_fma<4, true>);
  check_launch("fp32 product");
}

}  // namespace vocabshard::sm90
