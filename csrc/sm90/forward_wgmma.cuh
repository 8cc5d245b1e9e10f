// The fused forward on tensor cores: hidden @ weight^T and the contract's partials, no logits in memory.
//
// Clusters of two CTAs take the same rows and neighbouring columns; each loads half of the hidden tile into both. One
// producer warp fills a ring of stages by TMA; two consumer warpgroups take tiles in turn, so that one's epilogue runs
// while the other has the tensor cores.
#pragma once

#include "sm90/check.h"
#include "sm90/epilogue.h"
#include "sm90/forward_wgmma.h"
#include "sm90/lanes.h"
#include "sm90/params.h"
#include "sm90/ptx.h"
#include "sm90/wgmma.h"

namespace vocabshard::sm90 {

constexpr int kWarpgroup = 128;
constexpr int kForwardThreads = 3 * kWarpgroup;
// Of the 168 a thread the kernel starts with: 128 * 40 + 256 * 232 <= 65536.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
// A consumer reads its tile's entry before it gives back the tile's first stage, so the producer is at most kStages
// tiles ahead of it.
constexpr int kTileRing = 8;
static_assert(kTileRing > kStages, "the producer could overwrite a tile's entry before it is read");

template <int kMBlocks, int kGroups>
struct SharedLayout {
  static constexpr int kHiddenBytes = kMBlocks * 64 * kDepth * 2;
  static constexpr int kGroupBytes = kGroupColumns * kDepth * 2;
  static constexpr int kStageBytes = kHiddenBytes + kGroups * kGroupBytes;
  static constexpr int kBias = kStages * kStageBytes;                    // fp32, one tile's columns a consumer
  static constexpr int kTail = kBias + 2 * kGroups * kGroupColumns * 4;  // exchange_tail, a warp of a consumer each
  static constexpr int kTiles = kTail + 2 * 4 * kTailScratch;
  static constexpr int kFull = kTiles + kTileRing * 16;
  static constexpr int kEmpty = kFull + kStages * 8;
  static constexpr int kBytes = kEmpty + kStages * 8;
  static_assert(kBytes <= 227 * 1024, "more shared memory than a CTA can have");
};

enum NamedBarrier : uint32_t { kTurn = 1, kBiasReady = 3 };  // one a consumer each; 0 is __syncthreads

struct Stage {
  uint32_t index = 0, parity = 0;
  VS_DEVICE void next() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

template <int kMBlocks, int kGroups>
VS_DEVICE void produce(const WgmmaParams& p, uint32_t shared, int32_t count, int4* tiles) {
  using Layout = SharedLayout<kMBlocks, kGroups>;
  constexpr int kHalfRows = 32 * kMBlocks;
  const uint32_t rank = ptx::cluster_rank();
  Walk walk(p.schedule, blockIdx.x / 2, rank, kGroups);
  Stage stage;
  for (int32_t i = 0; i < count; ++i) {
    const Tile tile = walk.next();
    tiles[i % kTileRing] = make_int4(tile.m, tile.group, tile.groups, 0);
    const bool whole = tile.groups == kGroups && tile.group + kGroups <= p.whole_groups;
    const int32_t row = tile.m * (64 * kMBlocks) + static_cast<int32_t>(rank) * kHalfRows;
    for (int32_t block = 0; block < p.k_blocks; ++block) {
      const uint32_t full = shared + Layout::kFull + 8 * stage.index;
      const uint32_t at = shared + stage.index * Layout::kStageBytes;
      ptx::mbarrier_wait(shared + Layout::kEmpty + 8 * stage.index, stage.parity ^ 1);
      ptx::mbarrier_expect(full, Layout::kHiddenBytes + tile.groups * Layout::kGroupBytes);
      ptx::copy_2d_multicast(at + rank * (Layout::kHiddenBytes / 2), &p.hidden, full, block * kDepth, row, 3);
      if (whole) {
        ptx::copy_5d(at + Layout::kHiddenBytes, &p.tile, full, block * kDepth, tile.group);
      } else {
        for (int32_t a = 0; a < tile.groups; ++a) {
          const uint32_t to = at + Layout::kHiddenBytes + a * Layout::kGroupBytes;
          if (tile.group + a < p.whole_groups)
            ptx::copy_5d(to, &p.group, full, block * kDepth, tile.group + a);
          else
            ptx::copy_2d(to, &p.tail, full, block * kDepth, (tile.group + a) * kGroupColumns);
        }
      }
      stage.next();
    }
  }
}

// Each warp tells both CTAs that it is done with a stage: the hidden tile there came from both.
VS_DEVICE void release(uint32_t empty, uint32_t stage) {
  const int lane = ptx::thread() % 32;
  if (lane < 2) ptx::mbarrier_arrive_at(empty + 8 * stage, lane);
}

template <class Element, int kMBlocks, int kGroups>
VS_DEVICE void multiply(Accumulator<kMBlocks, kGroups>& acc, const WgmmaParams& p, uint32_t shared, Stage& stage,
                        int4& tile, const int4* tile_entry) {
  using Layout = SharedLayout<kMBlocks, kGroups>;
  uint32_t before = 0;
  for (int32_t block = 0; block < p.k_blocks; ++block) {
    ptx::mbarrier_wait(shared + Layout::kFull + 8 * stage.index, stage.parity);
    if (block == 0) tile = *tile_entry;
    const uint32_t at = shared + stage.index * Layout::kStageBytes;
    const uint64_t a = wgmma_descriptor(at), b = wgmma_descriptor(at + Layout::kHiddenBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
#pragma unroll
      for (int m = 0; m < kMBlocks; ++m)
        Wgmma<Element, kGroups * kGroupColumns>::run(acc.d[m], a + 512 * m + 2 * k, b + 2 * k, block + k);
    ptx::wgmma_commit();
    if (block > 0) {
      ptx::wgmma_wait<1>();
      release(shared + Layout::kEmpty, before);
    }
    before = stage.index;
    stage.next();
  }
}

template <bool kEntropy, int kMBlocks, int kGroups>
VS_DEVICE void finish_tile(Accumulator<kMBlocks, kGroups>& acc, const WgmmaParams& p, const int4& tile, char* base,
                           char* lanes) {
  using Layout = SharedLayout<kMBlocks, kGroups>;
  constexpr int kColumns = kGroups * kGroupColumns;
  const RowWork& work = p.work;
  const int thread = ptx::thread(), consumer = thread / kWarpgroup - 1, warp = thread / 32 % 4, lane = thread % 32;
  const int q = lane % 4;
  const int32_t first_row = tile.x * (64 * kMBlocks);
  const int64_t first_column = static_cast<int64_t>(tile.y) * kGroupColumns;
  const int32_t loaded = tile.z * kGroupColumns;
  const int32_t columns = static_cast<int32_t>(min(work.columns - first_column, static_cast<int64_t>(loaded)));
  const int32_t valid = static_cast<int32_t>(min(work.valid - first_column, static_cast<int64_t>(loaded)));

  if (tile.y + tile.z > p.whole_groups) {
    float* tail = reinterpret_cast<float*>(base + Layout::kTail + (4 * consumer + warp) * kTailScratch);
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
      if (tile.y + a == p.whole_groups) exchange_tail(acc, a, tail, lane);
  }
  if (work.bias_type != kBiasNone) {
    float* bias = reinterpret_cast<float*>(base + Layout::kBias) + consumer * kColumns;
    for (int32_t i = 32 * warp + lane; i < kColumns; i += kWarpgroup)
      bias[i] = i < columns ? load_bias(work.bias, work.bias_type, first_column + i) : 0.0f;
    ptx::barrier_sync(kBiasReady + consumer, kWarpgroup);
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
        const float4 b = *reinterpret_cast<const float4*>(bias + kGroupColumns * a + 16 * q + j);
#pragma unroll
        for (int r = 0; r < 2 * kMBlocks; ++r) {
          acc.at(r, a, j) = add(acc.at(r, a, j), b.x);
          acc.at(r, a, j + 1) = add(acc.at(r, a, j + 1), b.y);
          acc.at(r, a, j + 2) = add(acc.at(r, a, j + 2), b.z);
          acc.at(r, a, j + 3) = add(acc.at(r, a, j + 3), b.w);
        }
      }
    ptx::barrier_sync(kBiasReady + consumer, kWarpgroup);  // nobody reads any more when the next tile's bias is written
  }
  if (work.cap != 0.0f) softcap_all(acc, work.cap);
  if (work.logits != nullptr) store_logits(acc, work, first_row, first_column, columns, valid, warp, lane);
  if (work.scaled) {
#pragma unroll
    for (int r = 0; r < 2 * kMBlocks; ++r) {
      const int32_t row = first_row + row_of(r, warp, lane);
      float scale = work.inv_temperature;
      if (work.row_inv_temperature != nullptr) scale = row < work.rows ? work.row_inv_temperature[row] : 1.0f;
#pragma unroll
      for (int a = 0; a < kGroups; ++a)
#pragma unroll
        for (int j = 0; j < 16; ++j) acc.at(r, a, j) = mul(acc.at(r, a, j), scale);
    }
  }
  store_targets(acc, work, p.target_y, first_row, first_column, valid, warp, lane);
  if (valid < kColumns) {
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const bool padding = kGroupColumns * a + 16 * q + j >= valid;
#pragma unroll
        for (int r = 0; r < 2 * kMBlocks; ++r) acc.at(r, a, j) = padding ? neg_inf() : acc.at(r, a, j);
      }
  }
#pragma unroll
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    float y[kGroups][kTile];
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
#pragma unroll
      for (int j = 0; j < kTile; ++j) y[a][j] = acc.at(r, a, j);
    lane_add<kEntropy, kGroups>(lanes + r * kLaneParts<kEntropy> * kLanePartBytes, y);
  }
}

template <class Element, bool kEntropy, int kMBlocks, int kGroups>
VS_DEVICE void consume(const WgmmaParams& p, char* base, uint32_t shared, int32_t count, int32_t m_home, char* lanes) {
  using Layout = SharedLayout<kMBlocks, kGroups>;
  constexpr int kPlace = 2 * kMBlocks * kLaneParts<kEntropy> * kLanePartBytes;  // one warp's lanes
  const int32_t places = most_m(p.schedule);
  const int consumer = threadIdx.x / kWarpgroup - 1;
  lanes += threadIdx.x / 32 % 4 * kPlace + threadIdx.x % 32 * 16;
  for (int32_t i = 0; i < places; ++i)
    for (int r = 0; r < 2 * kMBlocks; ++r)
      lane_clear<kEntropy>(lanes + i * (4 * kPlace) + r * kLaneParts<kEntropy> * kLanePartBytes);

  const int4* tiles = reinterpret_cast<const int4*>(base + Layout::kTiles);
  if (consumer == 1 && count > 0) ptx::barrier_arrive(kTurn, 2 * kWarpgroup);

  for (int32_t i = consumer; i < count; i += 2) {
    const uint32_t step = static_cast<uint32_t>(i) * p.k_blocks;
    Stage stage;
    stage.index = step % kStages;
    stage.parity = (step / kStages) & 1;
    Accumulator<kMBlocks, kGroups> acc;
    int4 tile;
    ptx::barrier_sync(kTurn + i % 2, 2 * kWarpgroup);
    multiply<Element>(acc, p, shared, stage, tile, tiles + i % kTileRing);
    if (i + 1 < count) ptx::barrier_arrive(kTurn + 1 - i % 2, 2 * kWarpgroup);
    ptx::wgmma_wait<0>();
    acc.settle();
    release(shared + Layout::kEmpty, stage.index == 0 ? kStages - 1 : stage.index - 1);
    if (tile.z > 0) finish_tile<kEntropy>(acc, p, tile, base, lanes + (tile.x - m_home) * (4 * kPlace));
  }
}

template <class Element, bool kEntropy, int kMBlocks, int kGroups>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kForwardThreads, 1)
    forward_wgmma(const __grid_constant__ WgmmaParams p) {
  using Layout = SharedLayout<kMBlocks, kGroups>;
  extern __shared__ __align__(1024) char base[];
  const uint32_t shared = ptx::shared_address(base);
  if (shared % 1024 != 0) __trap();  // the swizzle counts from multiples of 1024
  const int32_t cluster = blockIdx.x / 2;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(shared + Layout::kFull + 8 * i, 1);
      ptx::mbarrier_init(shared + Layout::kEmpty + 8 * i, 2 * 4);  // 4 warps of one consumer in each CTA
    }
    ptx::mbarrier_init_fence();
    ptx::prefetch_map(&p.hidden);
    ptx::prefetch_map(&p.tile);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();

  if (threadIdx.x < kWarpgroup) {
    ptx::registers_lower<kProducerRegisters>();
    if (threadIdx.x == 0)
      produce<kMBlocks, kGroups>(p, shared, tile_count(p.schedule, cluster, kGroups),
                                 reinterpret_cast<int4*>(base + Layout::kTiles));
  } else {
    ptx::registers_raise<kConsumerRegisters>();
    constexpr int kLaneBytes = 4 * 2 * kMBlocks * kLaneParts<kEntropy> * kLanePartBytes;
    char* lanes =
        p.lanes + static_cast<int64_t>(blockIdx.x * 2 + threadIdx.x / kWarpgroup - 1) * most_m(p.schedule) * kLaneBytes;
    consume<Element, kEntropy, kMBlocks, kGroups>(p, base, shared, tile_count(p.schedule, cluster, kGroups),
                                                  m_first(p.schedule, cluster), lanes);
  }
  __syncwarp();
  // The peer may still copy into this CTA or arrive at its barriers.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

template <class Element, bool kEntropy, int kMBlocks, int kGroups>
void launch_one(const WgmmaParams& p, cudaStream_t stream) {
  const auto kernel = forward_wgmma<Element, kEntropy, kMBlocks, kGroups>;
  constexpr int kBytes = SharedLayout<kMBlocks, kGroups>::kBytes;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "shared memory");
  kernel<<<2 * p.schedule.clusters, kForwardThreads, kBytes, stream>>>(p);
}

template <class Element>
void launch_element(const WgmmaParams& p, int32_t path, bool entropy, cudaStream_t stream) {
  if (path == kRows64) {
    entropy ? launch_one<Element, true, kShape64.m_blocks, kShape64.groups>(p, stream)
            : launch_one<Element, false, kShape64.m_blocks, kShape64.groups>(p, stream);
  } else {
    entropy ? launch_one<Element, true, kShape128.m_blocks, kShape128.groups>(p, stream)
            : launch_one<Element, false, kShape128.m_blocks, kShape128.groups>(p, stream);
  }
}

}  // namespace vocabshard::sm90
