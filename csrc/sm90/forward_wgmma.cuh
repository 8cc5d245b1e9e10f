// The fused forward on tensor cores: the tiles of mainloop.cuh and the contract's partials, no logits in memory.
// Partials wait in shared memory, where both consumers add to them in turn.
#pragma once

#include "sm90/check.h"
#include "sm90/draw_epilogue.h"
#include "sm90/epilogue.h"
#include "sm90/forward_wgmma.h"
#include "sm90/kept.h"
#include "sm90/lanes.h"
#include "sm90/mainloop.cuh"
#include "sm90/params.h"
#include "sm90/ptx.h"
#include "sm90/topk_collect.cuh"

namespace vocabshard::sm90 {

// kDraw: a token of every row is drawn beside. kTop, further down: its best columns are listed.
template <bool kEntropy, bool kDraw, int kMBlocks, int kGroups>
struct SharedLayout {
  static constexpr int kRows = 64 * kMBlocks;
  // as many stages as there is room for beside the counters
  static constexpr int kRing = kMBlocks == 1 ? kStages + 1 : kEntropy ? kStages - 1 : kStages;
  // What follows is both consumers', who take turns in the epilogue.
  static constexpr int kMaxima = Ring<kMBlocks, kGroups, kRing>::kEnd;  // [places][rows], fp32
  static constexpr int kTargets = kMaxima + kPlaces * kRows * 4;        // [places][rows], int32
  static constexpr int kBias = kTargets + kPlaces * kRows * 4;          // fp32, one tile's columns
  static constexpr int kDrawn = kBias + kGroups * kGroupColumns * 4;
  static constexpr int kCounters = kDrawn + (kDraw ? static_cast<int>(sizeof(DrawState)) : 0);
  static constexpr int kRowGroupWords = 32 * kLaneWords<kEntropy>;
  static constexpr int kPlaceWords = 4 * 2 * kMBlocks * kRowGroupWords;  // [4 warps][row groups][words][32 lanes]
  static constexpr int bytes(int places) { return kCounters + places * kPlaceWords * 8; }
  static constexpr int kBytes = bytes(kPlaces);
  static_assert(kBytes <= 227 * 1024, "more shared memory than a CTA can have");
};

constexpr int kRehearsedFrom = 16;  // blocks of k

// Whether it tells who is launched beside it how far it is.
template <bool kDraw, int kMBlocks>
constexpr bool kTells = kMBlocks == 1 && !kDraw;

enum ForwardBarrier : uint32_t {
  kEpilogueTurn = kFirstFreeBarrier,  // one a consumer
  kBiasReady = kEpilogueTurn + 2,
  kAllDone,
  kWordsReady
};

template <int kMBlocks, int kGroups>
VS_DEVICE void leave_out_padding(Accumulator<kMBlocks, kGroups>& acc, int32_t valid, int q) {
  if (valid >= kGroups * kGroupColumns) return;
#pragma unroll
  for (int a = 0; a < kGroups; ++a)
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const bool padding = kGroupColumns * a + 16 * q + j >= valid;
#pragma unroll
      for (int r = 0; r < 2 * kMBlocks; ++r) acc.at(r, a, j) = padding ? neg_inf() : acc.at(r, a, j);
    }
}

template <bool kEntropy, bool kDraw, bool kTop, int kMBlocks, int kGroups>
VS_DEVICE void finish_tile(Accumulator<kMBlocks, kGroups>& acc, const WgmmaParams& p, const int4& tile, char* base,
                           bool real) {
  using Layout = SharedLayout<kEntropy, kDraw, kMBlocks, kGroups>;
  constexpr int kColumns = kGroups * kGroupColumns;
  const RowWork& work = p.work;
  uint32_t thread = ptx::thread();
  int warp = thread / 32 % 4, lane = thread % 32, q = lane % 4;
  const int32_t first_row = tile.x * Layout::kRows, first_column = tile.y * kGroupColumns;
  const int32_t columns = min(work.columns - first_column, tile.z * kGroupColumns);
  const int32_t valid = min(work.valid - first_column, tile.z * kGroupColumns);

  if (tile.y + tile.z > p.operands.whole_groups) {
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
      if (tile.y + a == p.operands.whole_groups) exchange_tail(acc, a, lane);
  }
  if (work.bias_type != kBiasNone) {
    float* bias = reinterpret_cast<float*>(base + Layout::kBias);
    for (int32_t i = 32 * warp + lane; i < kColumns; i += kWarpgroup)
      bias[i] = i < columns ? load_bias(work.bias, work.bias_type, first_column + i) : 0.0f;
    ptx::barrier_sync(kBiasReady, kWarpgroup);
    add_bias(acc, bias, lane);
  }
  if (work.cap != 0.0f) softcap_all(acc, work.cap);
  bool long_lists = false;
  if constexpr (kTop) {  // in place of logits, and of what is kept
    leave_out_padding(acc, valid, q);
    long_lists = collect(acc, p, tile.w, first_row, first_column, valid, warp, lane);
  } else if (work.logits != nullptr) {
    leave_out_padding(acc, valid, q);
    store_logits(acc, work, first_row, first_column, columns, warp, lane);
    if (kMBlocks == 1 && work.maxima.at != nullptr) store_maxima(acc, work, first_row, first_column, valid, warp, lane);
  }
  if constexpr (kDraw) {
    draw_tile(acc, work, p.draw.seed, *reinterpret_cast<DrawState*>(base + Layout::kDrawn), first_row, first_column,
              tile.z, valid);
    thread = ptx::thread(), warp = thread / 32 % 4, lane = thread % 32, q = lane % 4;  // they were not kept so long
  } else if (work.cut != nullptr) {
    leave_out(acc, work, first_row, first_column, warp, lane);
  }
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
  leave_out_padding(acc, valid, q);
  if constexpr (!kTop)
    if (work.kept.codes != nullptr) store_kept(acc, work.kept, tile);
  int64_t* counters = reinterpret_cast<int64_t*>(base + Layout::kCounters) + tile.w * Layout::kPlaceWords +
                      warp * (2 * kMBlocks * Layout::kRowGroupWords) + lane;
  float* maxima = reinterpret_cast<float*>(base + Layout::kMaxima) + tile.w * Layout::kRows;
  constexpr int kRowGroups = 2 * kMBlocks;
  // Where no products are in the way, a narrow tile at the end is over sooner. With 128 rows it is rarely narrow.
  const int32_t groups = kMBlocks == 1 ? tile.z : kGroups;
  float y_max[kRowGroups];
#pragma unroll
  for (int r = 0; r < kRowGroups; ++r) y_max[r] = lane_max(acc.row(r).y, groups);
  bool near_limit = false;
#pragma unroll
  for (int r = 0; r < kRowGroups; ++r) {
    y_max[r] = quad_max(ptx::max_nan(y_max[r], maxima[row_of(r, warp, lane)]));
    near_limit |= y_max[r] < kNearLimitFrom;
  }
  if (near_limit) acc.clamp();
#pragma unroll
  for (int r = 0; r < kRowGroups; ++r) {
    if (!real) {
      if (kMBlocks == 1) {  // each warp fetches another part of the code
        if (r != static_cast<int>(ptx::thread() / 32 % kRowGroups)) continue;
      } else if (r == kRowGroups / 2) {  // the rest the first tile fetches: this consumer is to multiply by then
        break;
      }
    }
    float& running = maxima[row_of(r, warp, lane)];
    lane_add<kEntropy>(counters + r * Layout::kRowGroupWords, running, y_max[r], acc.row(r).y, groups);
    __syncwarp();  // all four lanes have read it
    running = y_max[r];
  }
  if constexpr (kTop)
    if (long_lists) shorten_tile<kMBlocks>(p, tile.w, warp, lane);
}

// Empty partials of one place, and the local columns of its rows' targets.
template <bool kEntropy, bool kDraw, int kMBlocks, int kGroups>
VS_DEVICE void start_place(const WgmmaParams& p, char* base, int place, int32_t block) {
  using Layout = SharedLayout<kEntropy, kDraw, kMBlocks, kGroups>;
  const int thread = threadIdx.x % kWarpgroup;
  int64_t* counters = reinterpret_cast<int64_t*>(base + Layout::kCounters) + place * Layout::kPlaceWords;
  for (int i = thread; i < Layout::kPlaceWords; i += kWarpgroup) counters[i] = 0;
  for (int i = thread; i < Layout::kRows; i += kWarpgroup) {
    const int64_t row = static_cast<int64_t>(block) * Layout::kRows + i;
    int64_t target = !kDraw && row < p.work.rows ? p.work.target_ids[row] - p.work.vocab_start : -1;
    if (target < 0 || target >= p.work.valid) target = -1;
    reinterpret_cast<float*>(base + Layout::kMaxima)[place * Layout::kRows + i] = neg_inf();
    reinterpret_cast<int32_t*>(base + Layout::kTargets)[place * Layout::kRows + i] = static_cast<int32_t>(target);
  }
  if constexpr (kDraw)
    start_draw(p.work, p.draw.row_keys, *reinterpret_cast<DrawState*>(base + Layout::kDrawn), block * Layout::kRows,
               thread);
}

// One place's partials, a record a row.
template <bool kEntropy, bool kDraw, int kMBlocks, int kGroups>
VS_DEVICE void store_place(const WgmmaParams& p, const char* base, int place) {
  using Layout = SharedLayout<kEntropy, kDraw, kMBlocks, kGroups>;
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
  if constexpr (kDraw)
    store_draw(*reinterpret_cast<const DrawState*>(base + Layout::kDrawn),
               p.draw.winners + static_cast<int64_t>(blockIdx.x) * (kWinnerWords * Layout::kRows), warp, lane);
}

template <class Element, bool kEntropy, bool kDraw, bool kTop, int kMBlocks, int kGroups>
VS_DEVICE void consume(const WgmmaParams& p, char* base, uint32_t shared, int32_t count) {
  using Layout = SharedLayout<kEntropy, kDraw, kMBlocks, kGroups>;
  const int consumer = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup)) - 1;
  // Consumer 0 starts the first of two places, 1 the last: the one that the rehearsal leaves its traces in. Lists in
  // memory would have to be there for it, and cost a spill: with them there is none.
  const int last_place = places(p.schedule) - 1;
  const auto start = [&p, base](int place) {
    const int32_t unit = first_unit(p.schedule, blockIdx.x / 2) + place;
    const int32_t block = block_of_unit(p.schedule, unit, ptx::cluster_rank());
    start_place<kEntropy, kDraw, kMBlocks, kGroups>(p, base, place, block);
    if constexpr (kTop) start_lists<kMBlocks>(p, place, block);
  };
  int32_t tile_word = kTileWord + consumer;
  if (consumer < last_place || (kTop && consumer == last_place)) start(consumer);
  if (kTop && consumer == 1) ptx::barrier_arrive(kEpilogueTurn, 2 * kWarpgroup);
  take_turns<Element, kMBlocks, kGroups, Layout::kRing, kTop, !kTop>(
      p.operands, base, shared, count,
      [&](Accumulator<kMBlocks, kGroups>& acc, const int4& tile, bool more, bool real = true) {
        if (real) ptx::barrier_sync(kEpilogueTurn + consumer, 2 * kWarpgroup);
        if (tile.z > 0) finish_tile<kEntropy, kDraw, kTop>(acc, p, tile, base, real);
        if (!real) {
          ptx::barrier_sync(kBiasReady, kWarpgroup);  // all warps have left the place
          start(last_place);
        }
        if (more) ptx::barrier_arrive(kEpilogueTurn + 1 - consumer, 2 * kWarpgroup);
        if constexpr (kTells<kDraw, kMBlocks>) {
          if (!real) return;
          if (more && p.work.maxima.at != nullptr && tile_word < kTileWord + kToldTiles) {
            __syncwarp();
            if (ptx::thread() % 32 == 0) ptx::add_release(p.work.maxima.words + tile_word, 1);
          }
          tile_word += 2;
        }
      },
      // beyond the last column; nothing is rehearsed where the first tile would have to wait for it
      make_int4(0, p.schedule.groups, p.operands.k_blocks >= kRehearsedFrom ? kGroups : 0, last_place));
  ptx::barrier_sync(kAllDone, 2 * kWarpgroup);
  if (consumer < places(p.schedule)) store_place<kEntropy, kDraw, kMBlocks, kGroups>(p, base, consumer);
}

template <class Element, bool kEntropy, bool kDraw, bool kTop, int kMBlocks, int kGroups, int kRegisters>
VS_DEVICE void forward(const WgmmaParams& p, char* base) {
  using Layout = SharedLayout<kEntropy, kDraw, kMBlocks, kGroups>;
  const uint32_t shared = ptx::uniform(ptx::shared_address(base)), warp = ptx::uniform(threadIdx.x / 32);
  const int32_t cluster = blockIdx.x / 2, count = tile_count(p.schedule, cluster);
  start_ring<kMBlocks, kGroups, Layout::kRing>(p.operands, base, shared);
  const bool tells = kTells<kDraw, kMBlocks> && p.work.maxima.at != nullptr;
  if (!tells) ptx::grid_launch_next();
  if (warp < kWarpgroup / 32) {
    ptx::registers_lower<kProducerRegisters>();
    if (threadIdx.x % 32 == 0) {
      Walk walk(p.schedule, cluster, ptx::cluster_rank());
      produce<kMBlocks, kGroups, Layout::kRing>(p.operands, base, shared, count, walk, warp);
    }
  } else {
    ptx::registers_raise<kRegisters>();
    if (tells) {  // the next grid may begin once a thread of each CTA says so
      for (int32_t i = 2 * kWarpgroup * blockIdx.x + threadIdx.x - kWarpgroup; i < p.work.maxima.word_count;
           i += 4 * kWarpgroup * p.schedule.clusters)
        p.work.maxima.words[i] = 0;
      __threadfence();
      ptx::barrier_sync(kWordsReady, 2 * kWarpgroup);
      ptx::grid_launch_next();
    }
    consume<Element, kEntropy, kDraw, kTop, kMBlocks, kGroups>(p, base, shared, count);
  }
  finish_ring();
  if (tells && threadIdx.x == 0) ptx::add_release(p.work.maxima.words + kEndedWord, 1);
}

template <class Element, bool kEntropy, bool kDraw, int kMBlocks, int kGroups, bool kTop = false>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kMainloopThreads, 1)
    forward_wgmma(const __grid_constant__ WgmmaParams p) {
  extern __shared__ __align__(1024) char base[];
  forward<Element, kEntropy, kDraw, kTop, kMBlocks, kGroups, kConsumerRegisters>(p, base);
}

// For few rows, whose accumulators are fewer: a block of the merge fits beside it, and is ready when it ends.
template <class Element, bool kEntropy, bool kDraw, int kMBlocks, int kGroups>
__global__ void __cluster_dims__(2, 1, 1) __maxnreg__(VS_ROOMY_REGISTERS)
    forward_wgmma_few(const __grid_constant__ WgmmaParams p) {
  extern __shared__ __align__(1024) char base[];
  forward<Element, kEntropy, kDraw, false, kMBlocks, kGroups, kRoomyConsumerRegisters>(p, base);
}

template <class Element, bool kEntropy, bool kDraw, int kMBlocks, int kGroups, bool kTop = false>
void launch_one(const WgmmaParams& p, cudaStream_t stream) {
  const auto kernel = [] {
    if constexpr (kMBlocks == 1 && !kDraw)  // a draw would spill
      return forward_wgmma_few<Element, kEntropy, kDraw, kMBlocks, kGroups>;
    else
      return forward_wgmma<Element, kEntropy, kDraw, kMBlocks, kGroups, kTop>;
  }();
  using Layout = SharedLayout<kEntropy, kDraw, kMBlocks, kGroups>;
  static OncePerDevice once;
  once([&] {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes), "shared memory");
  });
  // no more than it needs: the merge's blocks are to fit beside it
  kernel<<<2 * p.schedule.clusters, kMainloopThreads, Layout::bytes(places(p.schedule)), stream>>>(p);
}

template <class Element>
void launch_element(const WgmmaParams& p, int32_t path, bool entropy, cudaStream_t stream) {
  if (path == kRows64) {
    entropy ? launch_one<Element, true, false, kShape64.m_blocks, kShape64.groups>(p, stream)
            : launch_one<Element, false, false, kShape64.m_blocks, kShape64.groups>(p, stream);
  } else {
    entropy ? launch_one<Element, true, false, kShape128.m_blocks, kShape128.groups>(p, stream)
            : launch_one<Element, false, false, kShape128.m_blocks, kShape128.groups>(p, stream);
  }
}

}  // namespace vocabshard::sm90
