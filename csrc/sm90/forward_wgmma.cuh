// The fused forward on tensor cores: the tiles of mainloop.cuh and the contract's partials, no logits in memory.
#pragma once

#include "sm90/check.h"
#include "sm90/epilogue.h"
#include "sm90/forward_wgmma.h"
#include "sm90/lanes.h"
#include "sm90/mainloop.cuh"
#include "sm90/params.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

template <int kMBlocks, int kGroups>
struct SharedLayout {
  static constexpr int kBias = Ring<kMBlocks, kGroups>::kEnd;            // fp32, one tile's columns a consumer
  static constexpr int kTail = kBias + 2 * kGroups * kGroupColumns * 4;  // exchange_tail, a warp of a consumer each
  static constexpr int kBytes = kTail + 2 * 4 * kTailScratch;
  static_assert(kBytes <= 227 * 1024, "more shared memory than a CTA can have");
};

constexpr uint32_t kBiasReady = kFirstFreeBarrier;  // one a consumer

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

  if (tile.y + tile.z > p.operands.whole_groups) {
    float* tail = reinterpret_cast<float*>(base + Layout::kTail + (4 * consumer + warp) * kTailScratch);
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
      if (tile.y + a == p.operands.whole_groups) exchange_tail(acc, a, tail, lane);
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
  constexpr int kPlace = 2 * kMBlocks * kLaneParts<kEntropy> * kLanePartBytes;  // one warp's lanes
  const int32_t places = most_m(p.schedule);
  lanes += threadIdx.x / 32 % 4 * kPlace + threadIdx.x % 32 * 16;
  for (int32_t i = 0; i < places; ++i)
    for (int r = 0; r < 2 * kMBlocks; ++r)
      lane_clear<kEntropy>(lanes + i * (4 * kPlace) + r * kLaneParts<kEntropy> * kLanePartBytes);
  take_turns<Element, kMBlocks, kGroups>(
      p.operands, base, shared, count,
      [&p, base, lanes, m_home](Accumulator<kMBlocks, kGroups>& acc, const int4& tile) {
        finish_tile<kEntropy>(acc, p, tile, base, lanes + (tile.x - m_home) * (4 * kPlace));
      });
}

template <class Element, bool kEntropy, int kMBlocks, int kGroups>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kMainloopThreads, 1)
    forward_wgmma(const __grid_constant__ WgmmaParams p) {
  extern __shared__ __align__(1024) char base[];
  const uint32_t shared = ptx::shared_address(base);
  const int32_t cluster = blockIdx.x / 2;
  start_ring<kMBlocks, kGroups>(p.operands, shared);
  if (threadIdx.x < kWarpgroup) {
    ptx::registers_lower<kProducerRegisters>();
    if (threadIdx.x == 0) {
      Walk walk(p.schedule, cluster, ptx::cluster_rank(), kGroups);
      produce<kMBlocks, kGroups>(p.operands, base, shared, tile_count(p.schedule, cluster, kGroups), walk);
    }
  } else {
    ptx::registers_raise<kConsumerRegisters>();
    constexpr int kLaneBytes = 4 * 2 * kMBlocks * kLaneParts<kEntropy> * kLanePartBytes;
    char* lanes =
        p.lanes + static_cast<int64_t>(blockIdx.x * 2 + threadIdx.x / kWarpgroup - 1) * most_m(p.schedule) * kLaneBytes;
    consume<Element, kEntropy, kMBlocks, kGroups>(p, base, shared, tile_count(p.schedule, cluster, kGroups),
                                                  m_first(p.schedule, cluster), lanes);
  }
  finish_ring();
}

template <class Element, bool kEntropy, int kMBlocks, int kGroups>
void launch_one(const WgmmaParams& p, cudaStream_t stream) {
  const auto kernel = forward_wgmma<Element, kEntropy, kMBlocks, kGroups>;
  constexpr int kBytes = SharedLayout<kMBlocks, kGroups>::kBytes;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "shared memory");
  kernel<<<2 * p.schedule.clusters, kMainloopThreads, kBytes, stream>>>(p);
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
