// out = init + A @ B on tensor cores.
//
// Clusters of two CTAs take the same rows and neighbouring columns; each loads half of A's tile into both. One producer
// warp fills a ring of stages by TMA; two consumer warpgroups take tiles in turn, so that one reads its accumulators
// from memory, or writes them, while the other has the tensor cores.
#pragma once

#include "sm90/kept_turn.cuh"
#include "sm90/product_epilogue.h"
#include "sm90/product_mma.h"
#include "sm90/product_params.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

// A tile of 64 * kBlocks rows and kColumns columns. kInit: the chain may go on from memory.
template <class Element_, bool kTransposedA_, bool kInit_, int kBlocks_, int kColumns_ = kProductColumns>
struct ProductKernel {
  using Element = Element_;
  static constexpr bool kTransposedA = kTransposedA_, kInit = kInit_;
  static constexpr int kBlocks = kBlocks_, kRows = 64 * kBlocks, kColumns = kColumns_;
  static constexpr int kClusterRows = kRows, kClusterColumns = 2 * kColumns;
  static constexpr bool kTurns = kTransposedA && !kInit && std::is_same_v<Element, __nv_bfloat16>;

  static constexpr int kWarpgroup = 128, kThreads = 3 * kWarpgroup;
  // Of the 168 a thread the kernel starts with: 128 * 40 + 256 * 232 <= 65536.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  // An operand's tile is boxes of 64 elements by 64 lines. A along k comes as one box of all its rows. A across k: if
  // its boxes can't be shared out evenly, half the lines of each.
  static constexpr int kBoxBytes = 64 * 64 * 2, kLineBytes = 128;
  static constexpr int kBoxesB = kColumns / 64;
  static constexpr bool kHalfBoxesA = kTransposedA && kBlocks % 2 != 0;
  static constexpr int kLinesA = kTransposedA ? (kHalfBoxesA ? 32 : 64) : kRows / 2, kLinesB = 64;
  static constexpr int kABytes = kBlocks * kBoxBytes, kStageBytes = kABytes + kBoxesB * kBoxBytes;
  static constexpr int kStages = 227 * 1024 / (kStageBytes + 24);
  static constexpr int kFull = kStages * kStageBytes, kEmpty = kFull + kStages * 8, kClean = kEmpty + kStages * 8;
  static constexpr int kSharedBytes = kClean + kStages * 8;
};

template <class Kernel>
using TileOf = ProductTile<Kernel::kBlocks, Kernel::kColumns>;

constexpr uint32_t kProductTurn = 1;  // named barriers, one a consumer

template <class Kernel>
struct ProductStage {
  uint32_t index = 0, parity = 0;

  VS_DEVICE explicit ProductStage(uint32_t step = 0)
      : index(step % Kernel::kStages), parity(step / Kernel::kStages & 1) {}
  VS_DEVICE void next() {
    if (++index == Kernel::kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

struct Origin {
  int32_t row, column;
};

// A cluster's tiles are every clusters-th of all, columns first: the clusters at work share few rows of A, and read
// them from device memory once.
template <class Kernel>
VS_DEVICE Origin tile_origin(const ProductParams& p, int32_t position) {
  const int32_t m = position / p.n_tiles, n = position - m * p.n_tiles;
  return {m * Kernel::kRows, (2 * n + static_cast<int32_t>(ptx::cluster_rank())) * Kernel::kColumns};
}

VS_DEVICE int32_t clusters() { return static_cast<int32_t>(gridDim.x / 2); }
VS_DEVICE int32_t first_tile() { return static_cast<int32_t>(blockIdx.x / 2); }
VS_DEVICE int32_t stages_of_tile(const ProductParams& p) { return (p.k_steps + 3) / 4; }

// This CTA's half of A's tile, to both.
template <class Kernel>
VS_DEVICE void copy_a(const ProductParams& p, uint32_t at, uint32_t full, int32_t row, int32_t k) {
  const int32_t rank = static_cast<int32_t>(ptx::cluster_rank());
  if constexpr (!Kernel::kTransposedA) {
    ptx::copy_2d_multicast(at + rank * (Kernel::kABytes / 2), &p.a, full, k, row + rank * (Kernel::kRows / 2), 3);
  } else if constexpr (Kernel::kHalfBoxesA) {
#pragma unroll
    for (int i = 0; i < Kernel::kBlocks; ++i)
      ptx::copy_2d_multicast(at + i * Kernel::kBoxBytes + rank * (Kernel::kBoxBytes / 2), &p.a, full, row + 64 * i,
                             k + rank * Kernel::kLinesA, 3);
  } else {
#pragma unroll
    for (int i = 0; i < Kernel::kBlocks / 2; ++i) {
      const int32_t box = rank * (Kernel::kBlocks / 2) + i;
      ptx::copy_2d_multicast(at + box * Kernel::kBoxBytes, &p.a, full, row + 64 * box, k, 3);
    }
  }
}

template <class Kernel>
VS_DEVICE void produce(const ProductParams& p, uint32_t shared) {
  const int32_t tiles = p.m_tiles * p.n_tiles, stages = stages_of_tile(p);
  ProductStage<Kernel> stage;
  for (int32_t position = first_tile(); position < tiles; position += clusters()) {
    const Origin origin = tile_origin<Kernel>(p, position);
    for (int32_t block = 0; block < stages; ++block) {
      const uint32_t full = shared + Kernel::kFull + 8 * stage.index;
      const uint32_t at = shared + stage.index * Kernel::kStageBytes;
      const int32_t k = block * kProductDepth;
      ptx::mbarrier_wait(shared + Kernel::kEmpty + 8 * stage.index, stage.parity ^ 1);
      ptx::mbarrier_expect(full, Kernel::kStageBytes);
      copy_a<Kernel>(p, at, full, origin.row, k);
#pragma unroll
      for (int i = 0; i < Kernel::kBoxesB; ++i)
        ptx::copy_2d(at + Kernel::kABytes + i * Kernel::kBoxBytes, &p.b, full, origin.column + 64 * i, k);
      stage.next();
    }
  }
}

// Each warp tells both CTAs that it is done with a stage: A's tile there came from both.
VS_DEVICE void release_stage(uint32_t empty, uint32_t stage) {
  const uint32_t lane = ptx::thread() % 32;
  if (lane < 2) ptx::mbarrier_arrive_at(empty + 8 * stage, lane);
}

// By one warp of the producer's, where rows of B are masked: writes zeros over them in every stage that comes, bit i of
// a word for row i, and tells this CTA's consumers. (A branch for it in their loop would cost them a tenth: its
// addresses would leave the uniform registers.)
template <class Kernel>
VS_DEVICE void clean(const ProductParams& p, char* base, uint32_t shared) {
  const int32_t tiles = p.m_tiles * p.n_tiles, stages = stages_of_tile(p);
  const int lane = threadIdx.x % 32;
  ProductStage<Kernel> stage;
  for (int32_t position = first_tile(); position < tiles; position += clusters())
    for (int32_t block = 0; block < stages; ++block) {
      const uint64_t mask = __ldg(p.row_mask + block);
      ptx::mbarrier_wait(shared + Kernel::kFull + 8 * stage.index, stage.parity);
      if (mask != 0) {
        char* at = base + stage.index * Kernel::kStageBytes + Kernel::kABytes + lane % 8 * 16;
        for (uint64_t rows = mask; rows != 0; rows &= rows - 1)
          for (int box = lane / 8; box < Kernel::kBoxesB; box += 4)
            *reinterpret_cast<uint4*>(at + box * Kernel::kBoxBytes +
                                      (__ffsll(static_cast<long long>(rows)) - 1) * Kernel::kLineBytes) =
                make_uint4(0, 0, 0, 0);
        ptx::fence_async_shared();
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(shared + Kernel::kClean + 8 * stage.index);
      stage.next();
    }
}

// Products of one stage that are ready to be issued.
template <class Kernel>
class StageProducts {
 public:
  VS_DEVICE StageProducts(uint32_t shared, const ProductStage<Kernel>& stage, uint32_t clean) {
    ptx::mbarrier_wait(shared + Kernel::kFull + 8 * stage.index, stage.parity);
    if constexpr (Kernel::kTransposedA) ptx::mbarrier_wait(clean + 8 * stage.index, stage.parity);
    const uint32_t at = shared + stage.index * Kernel::kStageBytes;
    a_ = Kernel::kTransposedA ? descriptor_across(at) : wgmma_descriptor(at);
    b_ = descriptor_across(at + Kernel::kABytes);
  }
  VS_DEVICE void issue(TileOf<Kernel>& acc, int step) const {  // 16 elements of k
#pragma unroll
    for (int m = 0; m < Kernel::kBlocks; ++m)
      ProductMma<typename Kernel::Element, Kernel::kTransposedA, Kernel::kColumns>::run(
          acc.d[m], a_ + 512 * m + (Kernel::kTransposedA ? 128 : 2) * step, b_ + 128 * step);
  }

 private:
  uint64_t a_, b_;
};

// `issued` is called when the products of all whole stages are under way.
template <class Kernel, class Issued>
VS_DEVICE void multiply_tile(TileOf<Kernel>& acc, const ProductParams& p, uint32_t shared, ProductStage<Kernel> stage,
                             const Issued& issued) {
  const uint32_t steps = ptx::uniform(p.k_steps), whole = steps / 4, rest = steps % 4;
  // what is not cleaned is ready when it's full
  const uint32_t clean = ptx::uniform(shared + (p.row_mask != nullptr ? Kernel::kClean : Kernel::kFull));
  uint32_t before = 0;
  for (uint32_t block = 0; block < whole; ++block) {
    const StageProducts<Kernel> products(shared, stage, clean);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) products.issue(acc, step);
    ptx::wgmma_commit();
    if (block > 0) {
      ptx::wgmma_wait<1>();
      release_stage(shared + Kernel::kEmpty, before);
    }
    before = stage.index;
    stage.next();
  }
  issued();
  ptx::wgmma_wait<0>();
  acc.settle();
  if (whole > 0) release_stage(shared + Kernel::kEmpty, before);
  if (rest > 0) {  // only the steps there are: one of zeros could turn a -0 into +0
    const StageProducts<Kernel> products(shared, stage, clean);
#pragma unroll 1
    for (uint32_t step = 0; step < rest; ++step) {
      ptx::wgmma_fence();
      products.issue(acc, step);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      acc.settle();
    }
    release_stage(shared + Kernel::kEmpty, stage.index);
  }
}

template <class Kernel>
VS_DEVICE void consume(const ProductParams& p, uint32_t shared) {
  const int32_t tiles = p.m_tiles * p.n_tiles;
  const int consumer = ptx::uniform(threadIdx.x / Kernel::kWarpgroup) - 1;
  if (consumer == 1) ptx::barrier_arrive(kProductTurn, 2 * Kernel::kWarpgroup);

  int32_t i = consumer;
  for (int32_t position = first_tile() + i * clusters(); position < tiles; position += 2 * clusters(), i += 2) {
    const Origin origin = tile_origin<Kernel>(p, position);
    TileOf<Kernel> acc;
    if constexpr (Kernel::kInit)
      load_init(acc, p, origin.row, origin.column, i == 0 ? 0 : p.pause);
    else
      acc.clear();
    ptx::barrier_sync(kProductTurn + consumer, 2 * Kernel::kWarpgroup);
    const ProductStage<Kernel> stage(static_cast<uint32_t>(i) * stages_of_tile(p));
    multiply_tile<Kernel>(acc, p, shared, stage, [&] {
      if (position + clusters() < tiles) ptx::barrier_arrive(kProductTurn + 1 - consumer, 2 * Kernel::kWarpgroup);
    });
    const uint32_t pause = position + clusters() < tiles ? p.pause : 0;  // nobody multiplies beside the last tile's
    if constexpr (Kernel::kTransposedA)
      store_tile<typename Kernel::Element>(acc, p, origin.row, origin.column, pause);
    else
      store_active<typename Kernel::Element>(acc, p, origin.row, origin.column, pause);
  }
}

template <class Kernel>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Kernel::kThreads, 1)
    product_wgmma(const __grid_constant__ ProductParams p) {
  extern __shared__ __align__(1024) char base[];
  const uint32_t shared = ptx::uniform(ptx::shared_address(base));
  if (shared % 1024 != 0) __trap();  // the swizzle counts from multiples of 1024

  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kStages; ++i) {
      ptx::mbarrier_init(shared + Kernel::kFull + 8 * i, 1);
      ptx::mbarrier_init(shared + Kernel::kEmpty + 8 * i, 2 * 4);  // 4 warps of one consumer in each CTA
      ptx::mbarrier_init(shared + Kernel::kClean + 8 * i, 1);
    }
    ptx::mbarrier_init_fence();
    ptx::prefetch_map(&p.a);
    ptx::prefetch_map(&p.b);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();

  if (threadIdx.x < Kernel::kWarpgroup) {
    ptx::registers_lower<Kernel::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Kernel>(p, shared);
    if (Kernel::kTransposedA && threadIdx.x / 32 == 1 && p.row_mask != nullptr) clean<Kernel>(p, base, shared);
    if constexpr (Kernel::kTurns)
      if (threadIdx.x >= 64 && p.turn.codes != nullptr)
        p.turn.plain ? turn_kept<true>(p.turn) : turn_kept<false>(p.turn);
  } else {
    ptx::registers_raise<Kernel::kConsumerRegisters>();
    consume<Kernel>(p, shared);
  }
  __syncwarp();
  // The peer may still copy into this CTA or arrive at its barriers.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace vocabshard::sm90
