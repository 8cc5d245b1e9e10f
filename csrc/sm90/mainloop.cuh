// The matrix product under every kernel that makes logits: tiles of hidden @ weight^T in a consumer's registers.
//
// Clusters of two CTAs share rows or columns; of what they share each loads half into both. The producer's warps fill a
// ring of stages by TMA; two consumer warpgroups take tiles in turn, so that one's epilogue runs while the other has
// the tensor cores.
#pragma once

#include "sm90/epilogue.h"
#include "sm90/params.h"
#include "sm90/ptx.h"
#include "sm90/wgmma.h"

namespace vocabshard::sm90 {

constexpr int kWarpgroup = 128;
constexpr int kMainloopThreads = 3 * kWarpgroup;
// Of the 168 a thread the kernel starts with: 128 * 40 + 256 * 232 <= 65536.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
// A kernel that leaves room for another block on its SM starts with fewer: 128 * 40 + 256 * 192 <= 384 * 144.
#define VS_ROOMY_REGISTERS 144
constexpr int kRoomyConsumerRegisters = 192;
// A consumer reads its tile's entry before it gives back the tile's first stage, so the producer is at most a ring of
// stages tiles ahead of it.
constexpr int kTileRing = 8;

// The first part of a CTA's shared memory; a kernel's own begins at kEnd, a multiple of 16.
template <int kMBlocks, int kGroups, int kRing = kStages>
struct Ring {
  static constexpr int kHiddenBytes = kMBlocks * 64 * kDepth * 2;
  static constexpr int kGroupBytes = kGroupColumns * kDepth * 2;
  static constexpr int kStageBytes = kHiddenBytes + kGroups * kGroupBytes;
  static constexpr int kTiles = kRing * kStageBytes;
  static constexpr int kFull = kTiles + kTileRing * 16;
  static constexpr int kEmpty = kFull + kRing * 8;
  static constexpr int kStart = kEmpty + kRing * 8;
  static constexpr int kEnd = (kStart + 8 + 15) / 16 * 16;
  static_assert(kTileRing > kRing, "the producer could overwrite a tile's entry before it is read");
};

enum NamedBarrier : uint32_t { kTurn = 1, kFirstFreeBarrier = 3 };  // one a consumer each; 0 is __syncthreads

template <int kRing>
struct Stage {
  uint32_t index = 0, parity = 0;
  VS_DEVICE void next() {
    if (++index == kRing) {
      index = 0;
      parity ^= 1;
    }
  }
  VS_DEVICE void skip(int32_t steps) {
    index += steps;
    parity ^= (index / kRing) & 1;
    index %= kRing;
  }
};

// By all threads, before anything else.
template <int kMBlocks, int kGroups, int kRing = kStages>
VS_DEVICE void start_ring(const Operands& o, char* base, uint32_t shared) {
  using Layout = Ring<kMBlocks, kGroups, kRing>;
  if (shared % 1024 != 0) __trap();  // the swizzle counts from multiples of 1024
  const int32_t most_rows = (o.share_columns ? 64 : 32) * kMBlocks;
  if (o.hidden_rows < most_rows) {  // what nothing is copied to is zero
    for (int i = 0; i < kRing; ++i)
      for (int j = threadIdx.x; j < Layout::kHiddenBytes / 16; j += kMainloopThreads)
        *reinterpret_cast<int4*>(base + i * Layout::kStageBytes + 16 * j) = int4{};
    ptx::fence_async_shared();
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRing; ++i) {
      ptx::mbarrier_init(shared + Layout::kFull + 8 * i, 1);
      ptx::mbarrier_init(shared + Layout::kEmpty + 8 * i, 2 * 4);  // 4 warps of one consumer in each CTA
    }
    ptx::mbarrier_init(shared + Layout::kStart, kWarpgroup / 32);
    ptx::mbarrier_init_fence();
    ptx::prefetch_map(&o.hidden);
    ptx::prefetch_map(o.share_columns ? &o.group : &o.tile);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

// By all threads, last: the peer may still copy into this CTA or arrive at its barriers.
VS_DEVICE void finish_ring() {
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

// Whole groups of columns into this CTA alone.
VS_DEVICE void copy_weight(const Operands& o, uint32_t to, const CUtensorMap* map, uint32_t full, int32_t k,
                           int32_t group) {
  if (o.read_once)
    ptx::copy_5d_once(to, map, full, k, 0, group);
  else
    ptx::copy_5d(to, map, full, k, 0, group);
}

// One group of columns, or where columns are shared this CTA's half of it into both.
template <class Layout>
VS_DEVICE void copy_group(const Operands& o, uint32_t to, uint32_t full, int32_t k, int32_t group, uint32_t rank) {
  const bool permuted = group < o.whole_groups;
  if (o.share_columns) {
    to += rank * (Layout::kGroupBytes / 2);
    if (permuted)
      ptx::copy_5d_multicast(to, &o.group, full, k, 4 * rank, group, 3);
    else
      ptx::copy_2d_multicast(to, &o.tail, full, k, group * kGroupColumns + 32 * rank, 3);
  } else {
    if (permuted)
      copy_weight(o, to, &o.group, full, k, group);
    else
      ptx::copy_2d(to, &o.tail, full, k, group * kGroupColumns);
  }
}

// The stages of one tile in turn, as soon as they are free: copy(start of the stage, its full barrier, k).
template <class Layout, int kRing, class Copy>
VS_DEVICE void fill(const Operands& o, uint32_t shared, Stage<kRing>& stage, const Copy& copy) {
  for (int32_t block = 0; block < o.k_blocks; ++block) {
    ptx::mbarrier_wait(shared + Layout::kEmpty + 8 * stage.index, stage.parity ^ 1);
    copy(shared + stage.index * Layout::kStageBytes, shared + Layout::kFull + 8 * stage.index, block * kDepth);
    stage.next();
  }
}

// By the first lane of each of the producer's warps: `count` tiles in the order that `walk` gives them. The first warp
// copies hidden, the others weight: to issue a copy takes a thread so long that one could not issue them all. They
// start each tile together: a warp that had no part in one would else wait for a later turn of a stage than the next,
// and a barrier's parity tells only the next from the one before.
template <int kMBlocks, int kGroups, int kRing = kStages, class Tiles>
VS_DEVICE void produce(const Operands& o, char* base, uint32_t shared, int32_t count, Tiles& walk, int warp) {
  using Layout = Ring<kMBlocks, kGroups, kRing>;
  constexpr int kRows = 64 * kMBlocks;
  int4* tiles = reinterpret_cast<int4*>(base + Layout::kTiles);
  const uint32_t rank = ptx::cluster_rank();
  Stage<kRing> stage;
  for (int32_t i = 0; i < count; ++i) {
    const Tile tile = walk.next();
    ptx::mbarrier_arrive(shared + Layout::kStart);
    ptx::mbarrier_wait(shared + Layout::kStart, i & 1);
    if (warp == 0) {
      tiles[i % kTileRing] = make_int4(tile.m, tile.group, tile.groups, tile.place);
      const uint32_t bytes =
          (o.share_columns ? 1 : 2) * o.hidden_rows * (kDepth * 2) + tile.groups * Layout::kGroupBytes;
      const int32_t half = static_cast<int32_t>(rank) * o.hidden_rows;
      const int32_t row = tile.m * kRows + (o.share_columns ? 0 : half);
      fill<Layout>(o, shared, stage, [&](uint32_t at, uint32_t full, int32_t k) {
        ptx::mbarrier_expect(full, bytes);
        if (o.share_columns)
          ptx::copy_2d(at, &o.hidden, full, k, row);
        else
          ptx::copy_2d_multicast(at + half * (kDepth * 2), &o.hidden, full, k, row, 3);
      });
    } else if (tile.groups == kGroups && tile.group + kGroups <= o.whole_groups && !o.share_columns) {
      if (warp == 1)
        fill<Layout>(o, shared, stage, [&](uint32_t at, uint32_t full, int32_t k) {
          copy_weight(o, at + Layout::kHiddenBytes, &o.tile, full, k, tile.group);
        });
      else
        stage.skip(o.k_blocks);
    } else if (warp <= tile.groups) {
      fill<Layout>(o, shared, stage, [&](uint32_t at, uint32_t full, int32_t k) {
#pragma unroll 1
        for (int32_t a = warp - 1; a < tile.groups; a += 3)
          copy_group<Layout>(o, at + Layout::kHiddenBytes + a * Layout::kGroupBytes, full, k, tile.group + a, rank);
      });
    } else {
      stage.skip(o.k_blocks);
    }
  }
}

// Each warp tells both CTAs that it is done with a stage: what lies there came from both.
VS_DEVICE void release(uint32_t empty, uint32_t stage) {
  const int lane = ptx::thread() % 32;
  if (lane < 2) ptx::mbarrier_arrive_at(empty + 8 * stage, lane);
}

template <class Element, int kMBlocks, int kGroups, int kRing>
VS_DEVICE void multiply(Accumulator<kMBlocks, kGroups>& acc, uint32_t shared, Stage<kRing>& stage, int4& tile,
                        const int4* tile_entry, int32_t k_blocks) {
  using Layout = Ring<kMBlocks, kGroups, kRing>;
  uint32_t before = 0;
  for (int32_t block = 0; block < k_blocks; ++block) {
    ptx::mbarrier_wait(shared + Layout::kFull + 8 * stage.index, stage.parity);
    if (block == 0) tile = *tile_entry;
    const uint32_t at = shared + stage.index * Layout::kStageBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
#pragma unroll
      for (int m = 0; m < kMBlocks; ++m)
        Wgmma<Element, kGroups * kGroupColumns>::run(acc.d[m], wgmma_descriptor(at, 512 * m + 2 * k),
                                                     wgmma_descriptor(at + Layout::kHiddenBytes, 2 * k),
                                                     k > 0 ? 1 : block);
    ptx::wgmma_commit();
    if (block > 0) {
      ptx::wgmma_wait<1>();
      release(shared + Layout::kEmpty, before);
    }
    before = stage.index;
    stage.next();
  }
}

// By both consumers: each takes every other of `count` tiles, and `finish(acc, tile, more)` makes of it what the kernel
// is for. tile is {block of rows, first group, groups, place}, `more` says that the other consumer has the next one.
// kClear: accumulators begin as zeros and not as what they are, which the compiler may keep from tile to tile, and
// spill.
// kRehearse: while the first tile is multiplied, the other consumer finishes the tile `rehearsed`, of which nothing is
// kept: so the code is there when it is wanted. Fetched by the first tile itself, it would keep the tensor cores
// waiting.
template <class Element, int kMBlocks, int kGroups, int kRing = kStages, bool kClear = false, bool kRehearse = false,
          class Finish>
VS_DEVICE void take_turns(const Operands& o, const char* base, uint32_t shared, int32_t count, const Finish& finish,
                          int4 rehearsed = {}) {
  using Layout = Ring<kMBlocks, kGroups, kRing>;
  const int consumer = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup)) - 1;
  const int4* tiles = reinterpret_cast<const int4*>(base + Layout::kTiles);
  if (consumer == 1 && count > 0) ptx::barrier_arrive(kTurn, 2 * kWarpgroup);

  for (int32_t i = kRehearse && consumer == 1 ? -1 : consumer; i < count; i += 2) {
    const bool real = !kRehearse || i >= 0;
    Stage<kRing> stage;
    Accumulator<kMBlocks, kGroups> acc;
    if constexpr (kClear) acc = {};
    int4 tile;
    if constexpr (kRehearse) tile = rehearsed;
    if (real) {
      stage.skip(i * o.k_blocks);
      ptx::barrier_sync(kTurn + i % 2, 2 * kWarpgroup);
    }
    multiply<Element>(acc, shared, stage, tile, tiles + i % kTileRing, real ? o.k_blocks : 0);
    if (real && i + 1 < count) ptx::barrier_arrive(kTurn + 1 - i % 2, 2 * kWarpgroup);
    ptx::wgmma_wait<0>();
    acc.settle();
    if (real) release(shared + Layout::kEmpty, stage.index == 0 ? kRing - 1 : stage.index - 1);
    if constexpr (kRehearse)
      finish(acc, tile, i + 1 < count, real);
    else
      finish(acc, tile, i + 1 < count);
  }
}

}  // namespace vocabshard::sm90
