// The fused forward on tensor cores: hidden @ weight^T and the contract's partials, no logits in memory.
//
// Clusters of two CTAs share columns or rows (schedule.h); of what they share each loads half into both. One producer
// warp fills a ring of stages by TMA; two consumer warpgroups take tiles in turn, so that one's epilogue runs while the
// other has the tensor cores. Partials wait in shared memory, where both consumers add to them in turn.
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
// A CTA's pool is what it starts with, 168 a thread, not the multiprocessor's 65536 registers: 128 * 40 + 256 * 232 =
// 384 * 168. With one more step of 8 the second consumer would wait for ever in registers_raise.
constexpr int kStartRegisters = 65536 / kForwardThreads / 8 * 8;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * kStartRegisters, "the consumers would hang");
// A consumer reads its tile's entry before it gives back the tile's first stage, so the producer is at most kStages
// tiles ahead of it.
constexpr int kTileRing = 8;

template <bool kEntropy, int kMBlocks, int kGroups>
struct SharedLayout {
  static constexpr int kRows = 64 * kMBlocks;
  static constexpr int kStages = kEntropy && kMBlocks > 1 ? 4 : 5;  // the entropy's counters need the room
  static constexpr int kHiddenBytes = kRows * kDepth * 2;
  static constexpr int kGroupBytes = kGroupColumns * kDepth * 2;
  static constexpr int kStageBytes = kHiddenBytes + kGroups * kGroupBytes;
  // What follows is both consumers', who take turns in the epilogue.
  static constexpr int kRowGroupWords = 32 * kLaneWords<kEntropy>;
  static constexpr int kPlaceWords = 4 * 2 * kMBlocks * kRowGroupWords;  // [4 warps][row groups][words][32 lanes]
  static constexpr int kCounters = kStages * kStageBytes;
  static constexpr int kMaxima = kCounters + kPlaces * kPlaceWords * 8;  // [places][rows], fp32
  static constexpr int kTargets = kMaxima + kPlaces * kRows * 4;         // [places][rows], int32
  static constexpr int kBias = kTargets + kPlaces * kRows * 4;           // fp32, one tile's columns
  static constexpr int kTiles = kBias + kGroups * kGroupColumns * 4;
  static constexpr int kFull = kTiles + kTileRing * 16;
  static constexpr int kEmpty = kFull + kStages * 8;
  static constexpr int kBytes = kEmpty + kStages * 8;
  static_assert(kBytes <= 227 * 1024, "more shared memory than a CTA can have");
  static_assert(kTileRing > kStages, "the producer could overwrite a tile's entry before it is read");
};

// One a consumer where there are two; 0 is __syncthreads.
enum NamedBarrier : uint32_t { kTensorTurn = 1, kEpilogueTurn = 3, kBiasReady = 5, kAllDone = 6 };

template <int kStages>
struct Stage {
  uint32_t index = 0, parity = 0;
  VS_DEVICE void next() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

template <class Layout, int kGroups>
VS_DEVICE void produce(const WgmmaParams& p, uint32_t shared, uint32_t rank, int32_t count, int4* tiles) {
  constexpr int kRows = Layout::kRows;
  const bool share_columns = p.schedule.share_columns;
  Walk walk(p.schedule, blockIdx.x / 2, static_cast<int32_t>(rank));
  Stage<Layout::kStages> stage;
  for (int32_t i = 0; i < count; ++i) {
    const Tile tile = walk.next();
    tiles[i % kTileRing] = make_int4(tile.m, tile.group, tile.groups, tile.place);
    const bool whole = tile.groups == kGroups && tile.group + kGroups <= p.whole_groups;
    for (int32_t block = 0; block < p.k_blocks; ++block) {
      const uint32_t full = shared + Layout::kFull + 8 * stage.index;
      const uint32_t at = shared + stage.index * Layout::kStageBytes, weight = at + Layout::kHiddenBytes;
      ptx::mbarrier_wait(shared + Layout::kEmpty + 8 * stage.index, stage.parity ^ 1);
      ptx::mbarrier_expect(full, Layout::kHiddenBytes + tile.groups * Layout::kGroupBytes);
      if (share_columns) {  // half of each group into both CTAs
        ptx::copy_2d(at, &p.hidden, full, block * kDepth, tile.m * kRows);
#pragma unroll 1
        for (int32_t a = 0; a < tile.groups; ++a) {
          const uint32_t to = weight + a * Layout::kGroupBytes + rank * (Layout::kGroupBytes / 2);
          if (tile.group + a < p.whole_groups)
            ptx::copy_5d_multicast(to, &p.group, full, block * kDepth, 4 * rank, tile.group + a, 3);
          else
            ptx::copy_2d_multicast(to, &p.tail, full, block * kDepth, (tile.group + a) * kGroupColumns + 32 * rank, 3);
        }
      } else {
        ptx::copy_2d_multicast(at + rank * (Layout::kHiddenBytes / 2), &p.hidden, full, block * kDepth,
                               tile.m * kRows + rank * (kRows / 2), 3);
        if (whole) {
          ptx::copy_5d(weight, &p.tile, full, block * kDepth, tile.group);
        } else {
#pragma unroll 1
          for (int32_t a = 0; a < tile.groups; ++a) {
            if (tile.group + a < p.whole_groups)
              ptx::copy_5d(weight + a * Layout::kGroupBytes, &p.group, full, block * kDepth, tile.group + a);
            else
              ptx::copy_2d(weight + a * Layout::kGroupBytes, &p.tail, full, block * kDepth,
                           (tile.group + a) * kGroupColumns);
          }
        }
      }
      stage.next();
    }
  }
}

// Each warp tells both CTAs that it is done with a stage: what lies there came from both.
VS_DEVICE void release(uint32_t empty, uint32_t stage) {
  const uint32_t lane = ptx::thread() % 32u;
  if (lane < 2) ptx::mbarrier_arrive_at(empty + 8 * stage, lane);
}

template <class Element, class Layout, int kMBlocks, int kGroups>
VS_DEVICE void multiply(Accumulator<kMBlocks, kGroups>& acc, int32_t k_blocks, uint32_t shared,
                        Stage<Layout::kStages>& stage, int4& tile, const int4* tile_entry) {
  uint32_t before = 0;
  for (int32_t block = 0; block < k_blocks; ++block) {
    ptx::mbarrier_wait(shared + Layout::kFull + 8 * stage.index, stage.parity);
    if (block == 0) tile = *tile_entry;
    const uint32_t at = shared + stage.index * Layout::kStageBytes;
    const uint32_t a = wgmma_descriptor(at), b = wgmma_descriptor(at + Layout::kHiddenBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
#pragma unroll
      for (int m = 0; m < kMBlocks; ++m)
        Wgmma<Element, kGroups * kGroupColumns>::run(acc.d[m], a + 512 * m + 2 * k, b + 2 * k, k > 0 ? 1 : block);
    ptx::wgmma_commit();
    if (block > 0) {
      ptx::wgmma_wait<1>();
      release(shared + Layout::kEmpty, before);
    }
    before = stage.index;
    stage.next();
  }
}

template <bool kEntropy, class Layout, int kMBlocks, int kGroups>
VS_DEVICE void finish_tile(Accumulator<kMBlocks, kGroups>& acc, const WgmmaParams& p, const int4& tile, char* base) {
  constexpr int kColumns = kGroups * kGroupColumns;
  const RowWork& work = p.work;
  const uint32_t thread = ptx::thread();
  const int warp = thread / 32 % 4, lane = thread % 32;
  const int q = lane % 4;
  const int32_t first_row = tile.x * Layout::kRows, first_column = tile.y * kGroupColumns;
  const int32_t columns = min(work.columns - first_column, tile.z * kGroupColumns);
  const int32_t valid = min(work.valid - first_column, tile.z * kGroupColumns);

  if (tile.y + tile.z > p.whole_groups) {
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
      if (tile.y + a == p.whole_groups) exchange_tail(acc, a, lane);
  }
  if (work.bias_type != kBiasNone) {
    float* bias = reinterpret_cast<float*>(base + Layout::kBias);
    for (int32_t i = 32 * warp + lane; i < kColumns; i += kWarpgroup)
      bias[i] = i < columns ? load_bias(work.bias, work.bias_type, first_column + i) : 0.0f;
    ptx::barrier_sync(kBiasReady, kWarpgroup);
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
  store_targets(acc, reinterpret_cast<const int32_t*>(base + Layout::kTargets) + tile.w * Layout::kRows, p.target_y,
                first_row, first_column, valid, warp, lane);
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
  int64_t* counters = reinterpret_cast<int64_t*>(base + Layout::kCounters) + tile.w * Layout::kPlaceWords +
                      warp * (2 * kMBlocks * Layout::kRowGroupWords) + lane;
  float* maxima = reinterpret_cast<float*>(base + Layout::kMaxima) + tile.w * Layout::kRows;
  constexpr int kRowGroups = 2 * kMBlocks;
  float y_max[kRowGroups];
#pragma unroll
  for (int r = 0; r < kRowGroups; ++r) y_max[r] = lane_max(acc.row(r).y);
  bool near_limit = false;
#pragma unroll
  for (int r = 0; r < kRowGroups; ++r) {
    y_max[r] = quad_max(ptx::max_nan(y_max[r], maxima[row_of(r, warp, lane)]));
    near_limit |= y_max[r] < kNearLimitFrom;
  }
  if (near_limit) acc.clamp();
#pragma unroll
  for (int r = 0; r < kRowGroups; ++r) {
    float& running = maxima[row_of(r, warp, lane)];
    lane_add<kEntropy>(counters + r * Layout::kRowGroupWords, running, y_max[r], acc.row(r).y);
    __syncwarp();  // all four lanes have read it
    running = y_max[r];
  }
}

// Empty partials of one place, and the local columns of its rows' targets.
template <bool kEntropy, class Layout>
VS_DEVICE void start_place(const WgmmaParams& p, char* base, int place, int32_t block) {
  const int thread = threadIdx.x % kWarpgroup;
  int64_t* counters = reinterpret_cast<int64_t*>(base + Layout::kCounters) + place * Layout::kPlaceWords;
  for (int i = thread; i < Layout::kPlaceWords; i += kWarpgroup) counters[i] = 0;
  for (int i = thread; i < Layout::kRows; i += kWarpgroup) {
    const int64_t row = static_cast<int64_t>(block) * Layout::kRows + i;
    int64_t target = row < p.work.rows ? p.work.target_ids[row] - p.work.vocab_start : -1;
    if (target < 0 || target >= p.work.valid) target = -1;
    reinterpret_cast<float*>(base + Layout::kMaxima)[place * Layout::kRows + i] = neg_inf();
    reinterpret_cast<int32_t*>(base + Layout::kTargets)[place * Layout::kRows + i] = static_cast<int32_t>(target);
  }
}

// One place's partials, a record a row.
template <bool kEntropy, class Layout, int kMBlocks>
VS_DEVICE void store_place(const WgmmaParams& p, const char* base, int place) {
  constexpr int kWords = kEntropy ? kRecordWordsEntropy : kRecordWords;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int64_t* counters = reinterpret_cast<const int64_t*>(base + Layout::kCounters) + place * Layout::kPlaceWords +
                            warp * (2 * kMBlocks * Layout::kRowGroupWords) + lane;
  const float* maxima = reinterpret_cast<const float*>(base + Layout::kMaxima) + place * Layout::kRows;
  int64_t* out =
      p.partials + (static_cast<int64_t>(blockIdx.x) * places(p.schedule) + place) * (kWords * Layout::kRows);
#pragma unroll
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    const int row = row_of(r, warp, lane);
    const Partial partial = quad_partial<kEntropy>(counters + r * Layout::kRowGroupWords, maxima[row]);
    if (lane % 4 == 0) record_store<kEntropy>(out + row, Layout::kRows, partial);
  }
}

template <class Element, bool kEntropy, class Layout, int kMBlocks, int kGroups>
VS_DEVICE void consume(const WgmmaParams& p, char* base, uint32_t shared, uint32_t rank, int32_t consumer,
                       int32_t count) {
  const int32_t cluster = blockIdx.x / 2;
  if (consumer < places(p.schedule))
    start_place<kEntropy, Layout>(p, base, consumer,
                                  block_of_unit(p.schedule, first_unit(p.schedule, cluster) + consumer, rank));
  const int4* tiles = reinterpret_cast<const int4*>(base + Layout::kTiles);
  if (consumer == 1) {
    ptx::barrier_arrive(kTensorTurn, 2 * kWarpgroup);
    ptx::barrier_arrive(kEpilogueTurn, 2 * kWarpgroup);
  }
  const int32_t k_blocks = p.k_blocks;
  for (int32_t i = consumer; i < count; i += 2) {
    const uint32_t step = static_cast<uint32_t>(i) * k_blocks;
    Stage<Layout::kStages> stage;
    stage.index = step % Layout::kStages;
    stage.parity = (step / Layout::kStages) & 1;
    Accumulator<kMBlocks, kGroups> acc;
    int4 tile;
    ptx::barrier_sync(kTensorTurn + consumer, 2 * kWarpgroup);
    multiply<Element, Layout>(acc, k_blocks, shared, stage, tile, tiles + i % kTileRing);
    if (i + 1 < count) ptx::barrier_arrive(kTensorTurn + 1 - consumer, 2 * kWarpgroup);
    ptx::wgmma_wait<0>();
    acc.settle();
    release(shared + Layout::kEmpty, stage.index == 0 ? Layout::kStages - 1 : stage.index - 1);
    ptx::barrier_sync(kEpilogueTurn + consumer, 2 * kWarpgroup);
    if (tile.z > 0) finish_tile<kEntropy, Layout>(acc, p, tile, base);
    if (i + 1 < count) ptx::barrier_arrive(kEpilogueTurn + 1 - consumer, 2 * kWarpgroup);
  }
  ptx::barrier_sync(kAllDone, 2 * kWarpgroup);
  ptx::grid_launch_next();
  if (consumer < places(p.schedule)) store_place<kEntropy, Layout, kMBlocks>(p, base, consumer);
}

template <class Element, bool kEntropy, int kMBlocks, int kGroups>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kForwardThreads, 1)
    forward_wgmma(const __grid_constant__ WgmmaParams p) {
  using Layout = SharedLayout<kEntropy, kMBlocks, kGroups>;
  extern __shared__ __align__(1024) char base[];
  const uint32_t shared = ptx::uniform(ptx::shared_address(base));
  if (shared % 1024 != 0) __trap();  // the swizzle counts from multiples of 1024
  const uint32_t rank = ptx::cluster_rank(), warpgroup = ptx::uniform(threadIdx.x / kWarpgroup);
  const int32_t count = tile_count(p.schedule, blockIdx.x / 2);

  if (threadIdx.x == 0) {
    for (int i = 0; i < Layout::kStages; ++i) {
      ptx::mbarrier_init(shared + Layout::kFull + 8 * i, 1);
      ptx::mbarrier_init(shared + Layout::kEmpty + 8 * i, 2 * 4);  // 4 warps of one consumer in each CTA
    }
    ptx::mbarrier_init_fence();
    ptx::prefetch_map(&p.hidden);
    ptx::prefetch_map(p.schedule.share_columns ? &p.group : &p.tile);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();

  if (warpgroup == 0) {
    ptx::registers_lower<kProducerRegisters>();
    if (threadIdx.x == 0)
      produce<Layout, kGroups>(p, shared, rank, count, reinterpret_cast<int4*>(base + Layout::kTiles));
  } else {
    ptx::registers_raise<kConsumerRegisters>();
    consume<Element, kEntropy, Layout, kMBlocks, kGroups>(p, base, shared, rank, static_cast<int32_t>(warpgroup) - 1,
                                                          count);
  }
  __syncwarp();
  // The peer may still copy into this CTA or arrive at its barriers.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

template <class Element, bool kEntropy, int kMBlocks, int kGroups>
void launch_one(const WgmmaParams& p, cudaStream_t stream) {
  const auto kernel = forward_wgmma<Element, kEntropy, kMBlocks, kGroups>;
  constexpr int kBytes = SharedLayout<kEntropy, kMBlocks, kGroups>::kBytes;
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
