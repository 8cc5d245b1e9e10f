// grad_hidden = init + A @ B in tiles of 128 rows x 256 columns: the fewest reads, for where such tiles fill the chip.
//
// Clusters of two CTAs take neighbouring rows and the same columns; each loads half of B's tile into both. The two
// consumers have 64 rows of a tile each.
#pragma once

#include "sm90/product_wgmma.cuh"

namespace vocabshard::sm90 {

template <class Element_>
struct WideKernel {
  using Element = Element_;
  static constexpr bool kTransposedA = false, kInit = true;
  static constexpr int kRows = 128, kColumns = 256, kClusterRows = 2 * kRows, kClusterColumns = kColumns;

  static constexpr int kWarpgroup = 128, kThreads = 3 * kWarpgroup;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  static constexpr int kBoxBytes = 64 * 64 * 2, kBoxesB = kColumns / 64;
  static constexpr int kLinesA = kRows, kLinesB = 64;
  static constexpr int kABytes = kRows / 64 * kBoxBytes, kStageBytes = kABytes + kBoxesB * kBoxBytes;
  static constexpr int kStages = 4;
  static constexpr int kFull = kStages * kStageBytes, kEmpty = kFull + kStages * 8;
  static constexpr int kSharedBytes = kEmpty + kStages * 8;
};

struct WideTile {
  float d[128];  // row 8 h + lane / 4 of a warp's 16, column 8 j + 2 q + e: at 4 j + 2 h + e

  VS_DEVICE void settle() {
#pragma unroll
    for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
  }
};

template <class Kernel>
VS_DEVICE Origin wide_origin(const ProductParams& p, int32_t position) {
  const int32_t m = position / p.n_tiles, n = position - m * p.n_tiles;
  return {(2 * m + static_cast<int32_t>(ptx::cluster_rank())) * Kernel::kRows, n * Kernel::kColumns};
}

template <class Kernel>
VS_DEVICE void produce_wide(const ProductParams& p, uint32_t shared) {
  const int32_t tiles = p.m_tiles * p.n_tiles, stages = stages_of_tile(p);
  const int32_t first_box = static_cast<int32_t>(ptx::cluster_rank()) * (Kernel::kBoxesB / 2);
  ProductStage<Kernel> stage;
  for (int32_t position = first_tile(); position < tiles; position += clusters()) {
    const Origin origin = wide_origin<Kernel>(p, position);
    for (int32_t block = 0; block < stages; ++block) {
      const uint32_t full = shared + Kernel::kFull + 8 * stage.index;
      const uint32_t at = shared + stage.index * Kernel::kStageBytes;
      const int32_t k = block * kProductDepth;
      ptx::mbarrier_wait(shared + Kernel::kEmpty + 8 * stage.index, stage.parity ^ 1);
      ptx::mbarrier_expect(full, Kernel::kStageBytes);
      ptx::copy_2d(at, &p.a, full, k, origin.row);
#pragma unroll
      for (int i = 0; i < Kernel::kBoxesB / 2; ++i) {
        const int32_t box = first_box + i;
        ptx::copy_2d_multicast(at + Kernel::kABytes + box * Kernel::kBoxBytes, &p.b, full, origin.column + 64 * box, k,
                               3);
      }
      stage.next();
    }
  }
}

// 16 bytes a lane, and the lanes of a quad exchange what they have read.
VS_DEVICE void load_wide(WideTile& acc, const ProductParams& p, int32_t first_row, int32_t first_column) {
  const int32_t rows = p.init == nullptr ? 0 : p.rows;  // not a branch: see load_init
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = tile_row(first_row, 0, h);
    const int32_t column = first_column + exchanged_column(quad_lane()), end = row < rows ? p.columns - column : 0;
    const float* from = p.init + row * p.init_row + column;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (8 * j < end) v = __ldcg(reinterpret_cast<const float4*>(from + 8 * j));
      float* d = acc.d + 4 * j + 2 * h;
      d[0] = v.x, d[1] = v.y, d[4] = v.z, d[5] = v.w;
    }
  }
  const int q = quad_lane();
#pragma unroll
  for (int i = 0; i < 128; i += 8)
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
      float* d = acc.d + i + h;
      const float4 v = exchange_pairs(d, q);
      d[0] = v.x, d[1] = v.y, d[4] = v.z, d[5] = v.w;
    }
}

// As store_active.
template <class Element>
VS_DEVICE void store_wide(WideTile& acc, const ProductParams& p, int32_t first_row, int32_t first_column) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = tile_row(first_row, 0, h);
    const int q = quad_lane();
    int32_t end = row < p.rows ? p.columns - first_column : 0;
    if (p.row_active != nullptr && row < p.rows && p.row_active[row] == 0) {
      if (p.init != nullptr || p.output == kProductAdd) end = 0;
#pragma unroll
      for (int j = 0; j < 32; ++j) acc.d[4 * j + 2 * h] = acc.d[4 * j + 2 * h + 1] = 0.0f;
    }
    if (p.output == kProductElement) {
      Element* to = static_cast<Element*>(p.out) + row * p.out_row + first_column + 8 * q;
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = pack<Element>(acc.d[4 * (j + i) + 2 * h], acc.d[4 * (j + i) + 2 * h + 1]);
        const uint4 block = transpose_quad(v, q);
        if (8 * (j + q) < end) __stcg(reinterpret_cast<uint4*>(to + 8 * j), block);
      }
      continue;
    }
    const int32_t column = exchanged_column(q);
    float* to = static_cast<float*>(p.out) + row * p.out_row + first_column + column;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const float4 v = exchange_pairs(acc.d + 4 * j + 2 * h, q);
      if (8 * j + column < end) put_floats(to + 8 * j, v, p);
    }
  }
}

template <class Kernel>
VS_DEVICE void multiply_wide(WideTile& acc, const ProductParams& p, uint32_t shared, ProductStage<Kernel>& stage,
                             uint32_t consumer) {
  const uint32_t steps = ptx::uniform(p.k_steps), whole = steps / 4, rest = steps % 4;
  uint32_t before = 0;
  const auto issue = [&](int step) {
    const uint32_t at = shared + stage.index * Kernel::kStageBytes;
    const uint64_t a = wgmma_descriptor(at + consumer * Kernel::kBoxBytes);
    const uint64_t b = descriptor_across(at + Kernel::kABytes);
    ProductMmaWide<typename Kernel::Element>::run(acc.d, a + 2 * step, b + 128 * step);
  };
  for (uint32_t block = 0; block < whole; ++block) {
    ptx::mbarrier_wait(shared + Kernel::kFull + 8 * stage.index, stage.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) issue(step);
    ptx::wgmma_commit();
    if (block > 0) {
      ptx::wgmma_wait<1>();
      release_stage(shared + Kernel::kEmpty, before);
    }
    before = stage.index;
    stage.next();
  }
  ptx::wgmma_wait<0>();
  acc.settle();
  if (whole > 0) release_stage(shared + Kernel::kEmpty, before);
  if (rest > 0) {  // only the steps there are: see multiply_tile
    ptx::mbarrier_wait(shared + Kernel::kFull + 8 * stage.index, stage.parity);
#pragma unroll 1
    for (uint32_t step = 0; step < rest; ++step) {
      ptx::wgmma_fence();
      issue(static_cast<int>(step));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      acc.settle();
    }
    release_stage(shared + Kernel::kEmpty, stage.index);
    stage.next();
  }
}

template <class Kernel>
VS_DEVICE void consume_wide(const ProductParams& p, uint32_t shared) {
  const int32_t tiles = p.m_tiles * p.n_tiles;
  const uint32_t consumer = ptx::uniform(threadIdx.x / Kernel::kWarpgroup) - 1;
  const int32_t below = static_cast<int32_t>(consumer) * 64;
  ProductStage<Kernel> stage;
  for (int32_t position = first_tile(); position < tiles; position += clusters()) {
    const Origin origin = wide_origin<Kernel>(p, position);
    WideTile acc;
    load_wide(acc, p, origin.row + below, origin.column);
    multiply_wide<Kernel>(acc, p, shared, stage, consumer);
    store_wide<typename Kernel::Element>(acc, p, origin.row + below, origin.column);
  }
}

template <class Kernel>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Kernel::kThreads, 1)
    product_wide(const __grid_constant__ ProductParams p) {
  extern __shared__ __align__(1024) char base[];
  const uint32_t shared = ptx::uniform(ptx::shared_address(base));
  if (shared % 1024 != 0) __trap();  // the swizzle counts from multiples of 1024

  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kStages; ++i) {
      ptx::mbarrier_init(shared + Kernel::kFull + 8 * i, 1);
      ptx::mbarrier_init(shared + Kernel::kEmpty + 8 * i, 2 * 2 * 4);  // the warps of both consumers in each CTA
    }
    ptx::mbarrier_init_fence();
    ptx::prefetch_map(&p.a);
    ptx::prefetch_map(&p.b);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();

  if (threadIdx.x < Kernel::kWarpgroup) {
    ptx::registers_lower<Kernel::kProducerRegisters>();
    if (threadIdx.x == 0) produce_wide<Kernel>(p, shared);
  } else {
    ptx::registers_raise<Kernel::kConsumerRegisters>();
    consume_wide<Kernel>(p, shared);
  }
  __syncwarp();
  // The peer may still copy into this CTA or arrive at its barriers.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace vocabshard::sm90
