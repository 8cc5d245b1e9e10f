// The matrix product under every kernel that makes logits: tiles of hidden @ weight^T in a consumer's registers.
//
// Clusters of two CTAs take the same rows and neighbouring columns; each loads half of the hidden tile into both. One
// producer warp fills a ring of stages by TMA; two consumer warpgroups take tiles in turn, so that one's epilogue runs
// while the other has the tensor cores.
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
// A consumer reads its tile's entry before it gives back the tile's first stage, so the producer is at most kStages
// tiles ahead of it.
constexpr int kTileRing = 8;
static_assert(kTileRing > kStages, "the producer could overwrite a tile's entry before it is read");

// The first part of a CTA's shared memory; a kernel's own begins at kEnd, a multiple of 16.
template <int kMBlocks, int kGroups>
struct Ring {
  static constexpr int kHiddenBytes = kMBlocks * 64 * kDepth * 2;
  static constexpr int kGroupBytes = kGroupColumns * kDepth * 2;
  static constexpr int kStageBytes = kHiddenBytes + kGroups * kGroupBytes;
  static constexpr int kTiles = kStages * kStageBytes;
  static constexpr int kFull = kTiles + kTileRing * 16;
  static constexpr int kEmpty = kFull + kStages * 8;
  static constexpr int kEnd = (kEmpty + kStages * 8 + 15) / 16 * 16;
};

enum NamedBarrier : uint32_t { kTurn = 1, kFirstFreeBarrier = 3 };  // one a consumer each; 0 is __syncthreads

struct Stage {
  uint32_t index = 0, parity = 0;
  VS_DEVICE void next() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// By all threads, before anything else.
template <int kMBlocks, int kGroups>
VS_DEVICE void start_ring(const Operands& o, uint32_t shared) {
  using Layout = Ring<kMBlocks, kGroups>;
  if (shared % 1024 != 0) __trap();  // the swizzle counts from multiples of 1024
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(shared + Layout::kFull + 8 * i, 1);
      ptx::mbarrier_init(shared + Layout::kEmpty + 8 * i, 2 * 4);  // 4 warps of one consumer in each CTA
    }
    ptx::mbarrier_init_fence();
    ptx::prefetch_map(&o.hidden);
    ptx::prefetch_map(&o.tile);
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

// By one thread of the producer: `count` tiles in the order that `walk` gives them.
template <int kMBlocks, int kGroups, class Tiles>
VS_DEVICE void produce(const Operands& o, char* base, uint32_t shared, int32_t count, Tiles& walk) {
  using Layout = Ring<kMBlocks, kGroups>;
  constexpr int kHalfRows = 32 * kMBlocks;
  int4* tiles = reinterpret_cast<int4*>(base + Layout::kTiles);
  const uint32_t rank = ptx::cluster_rank();
  Stage stage;
  for (int32_t i = 0; i < count; ++i) {
    const Tile tile = walk.next();
    tiles[i % kTileRing] = make_int4(tile.m, tile.group, tile.groups, 0);
    const bool whole = tile.groups == kGroups && tile.group + kGroups <= o.whole_groups;
    const int32_t row = tile.m * (64 * kMBlocks) + static_cast<int32_t>(rank) * kHalfRows;
    for (int32_t block = 0; block < o.k_blocks; ++block) {
      const uint32_t full = shared + Layout::kFull + 8 * stage.index;
      const uint32_t at = shared + stage.index * Layout::kStageBytes;
      ptx::mbarrier_wait(shared + Layout::kEmpty + 8 * stage.index, stage.parity ^ 1);
      ptx::mbarrier_expect(full, Layout::kHiddenBytes + tile.groups * Layout::kGroupBytes);
      ptx::copy_2d_multicast(at + rank * (Layout::kHiddenBytes / 2), &o.hidden, full, block * kDepth, row, 3);
      if (whole) {
        ptx::copy_5d(at + Layout::kHiddenBytes, &o.tile, full, block * kDepth, tile.group);
      } else {
        for (int32_t a = 0; a < tile.groups; ++a) {
          const uint32_t to = at + Layout::kHiddenBytes + a * Layout::kGroupBytes;
          if (tile.group + a < o.whole_groups)
            ptx::copy_5d(to, &o.group, full, block * kDepth, tile.group + a);
          else
            ptx::copy_2d(to, &o.tail, full, block * kDepth, (tile.group + a) * kGroupColumns);
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
VS_DEVICE void multiply(Accumulator<kMBlocks, kGroups>& acc, const Operands& o, uint32_t shared, Stage& stage,
                        int4& tile, const int4* tile_entry) {
  using Layout = Ring<kMBlocks, kGroups>;
  uint32_t before = 0;
  for (int32_t block = 0; block < o.k_blocks; ++block) {
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

// By both consumers: each takes every other of `count` tiles, and `finish(acc, tile)` makes of it what the kernel is
// for. tile is {block of rows, first group, groups, -}.
template <class Element, int kMBlocks, int kGroups, class Finish>
VS_DEVICE void take_turns(const Operands& o, const char* base, uint32_t shared, int32_t count, const Finish& finish) {
  using Layout = Ring<kMBlocks, kGroups>;
  const int consumer = threadIdx.x / kWarpgroup - 1;
  const int4* tiles = reinterpret_cast<const int4*>(base + Layout::kTiles);
  if (consumer == 1 && count > 0) ptx::barrier_arrive(kTurn, 2 * kWarpgroup);

  for (int32_t i = consumer; i < count; i += 2) {
    const uint32_t step = static_cast<uint32_t>(i) * o.k_blocks;
    Stage stage;
    stage.index = step % kStages;
    stage.parity = (step / kStages) & 1;
    Accumulator<kMBlocks, kGroups> acc;
    int4 tile;
    ptx::barrier_sync(kTurn + i % 2, 2 * kWarpgroup);
    multiply<Element>(acc, o, shared, stage, tile, tiles + i % kTileRing);
    if (i + 1 < count) ptx::barrier_arrive(kTurn + 1 - i % 2, 2 * kWarpgroup);
    ptx::wgmma_wait<0>();
    acc.settle();
    release(shared + Layout::kEmpty, stage.index == 0 ? kStages - 1 : stage.index - 1);
    if (tile.z > 0) finish(acc, tile);
  }
}

}  // namespace vocabshard::sm90
