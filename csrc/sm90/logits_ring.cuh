// Forward over aligned bf16 logits, ten of a tile's exponentials by table, rows by bulk copies into shared memory: in
// the table's hole every warp has a ring of its own, so that neither registers nor instructions are spent on loads.
#pragma once

#include "sm90/check.h"
#include "sm90/logits_forward.cuh"
#include "sm90/logits_lots.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90::logits {

constexpr int kRingTiles = 2;  // of a lane and step
constexpr uint32_t kRingStepTiles = 32 * kRingTiles, kTileBytes = kTile * BF16::kBytes;
constexpr uint32_t kRingColumns = kRingStepTiles * kTile;
constexpr uint32_t kRingStepBytes = kRingStepTiles * kTileBytes;
constexpr uint32_t kRingOffset = 4 * (Table::kEnd - Table::kFirst);  // the hole in the table

// What a warp keeps of a row or part that has ended.
struct Note {
  int64_t id;  // of the target
  int64_t c[kLimbs];
  uint32_t row, lot;
  float y_max, y_target;  // NaN: the target is not here
};

struct RingParams {
  ForwardParams forward;  // steps: kRingStepTiles tiles each
  Lots lots;
  uint32_t* next;      // lots that have been taken beside the workers' first ones
  uint32_t* arrivals;  // one a part of a row, of which a row uses its first
  int64_t* shared;     // a partial a part of a row
};

// A way through lots. The copies' way runs ahead of the sums'.
struct Way {
  uint32_t lot, row, rows;  // rows of the lot that are left, this one too
  uint32_t first, left;     // in this row: the part's first step, and steps to come
  uint32_t tiles;           // whole tiles of the row from the next step on

  VS_DEVICE void enter(const RingParams& p, uint32_t index) {
    lot = index;
    const Lot found = p.lots.at(index, p.forward.steps);
    row = found.row;
    rows = found.rows;
    first = found.first;
    left = found.steps;
    tiles = p.forward.valid / kTile - first * kRingStepTiles;
  }
  VS_DEVICE void next_row(const RingParams& p) {
    ++row;
    left = p.forward.steps;
    tiles = p.forward.valid / kTile;
  }
  VS_DEVICE void advance() {
    --left;
    tiles -= min(tiles, kRingStepTiles);
  }
};

constexpr uint32_t kAheadOfSums = 4;

// Of a warp: what its copies tell its sums.
struct Queue {
  volatile uint32_t lots[kAheadOfSums];
  volatile int64_t ids[kAheadOfSums];  // of the targets of rows or parts
};

// The copies of a warp; every lane knows the same, lane 0 asks.
template <int kStages>
struct Copies {
  Way way;
  uint64_t at;
  uint32_t taken;    // lane 0: how many lots were taken before this warp's next one
  uint32_t entered;  // lots so far, the last ones in queue
  uint32_t begun;    // rows or parts so far
  bool over;

  VS_DEVICE void enter(const RingParams& p, Queue& queue, uint32_t lot) {
    way.enter(p, lot);
    if ((threadIdx.x & 31) == 0) queue.lots[entered % kAheadOfSums] = lot;
    ++entered;
  }
  VS_DEVICE void start(const RingParams& p, Queue& queue, uint32_t lot) {
    over = false;
    entered = begun = 0;
    taken = 0;
    enter(p, queue, lot);
    begin_row(p, queue);
  }
  VS_DEVICE void begin_row(const RingParams& p, Queue& queue) {
    if ((threadIdx.x & 31) == 0) {
      const uint32_t to = ptx::shared_address(const_cast<int64_t*>(&queue.ids[begun % kAheadOfSums]));
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(p.forward.rows.target_ids + way.row)
                   : "memory");
    }
    ++begun;
    const char* const from = row_address(p.forward, way.row) + static_cast<int64_t>(way.first) * kRingStepBytes;
    const uint64_t address = reinterpret_cast<uint64_t>(from);
    at = static_cast<uint64_t>(ptx::uniform(static_cast<uint32_t>(address >> 32))) << 32 |
         ptx::uniform(static_cast<uint32_t>(address));
    if (way.left == 1) take_early(p);
  }
  // One step before it is needed.
  VS_DEVICE void take_early(const RingParams& p) {
    if (way.rows == 1 && p.lots.count > p.forward.workers && (threadIdx.x & 31) == 0)
      // back to 0 at the last one: every worker asks once in vain. Not an addition, whose result would be waited for.
      asm volatile("atom.global.inc.u32 %0, [%1], %2;" : "=r"(taken) : "l"(p.next), "r"(p.lots.count - 1) : "memory");
  }
  VS_DEVICE void next_lot(const RingParams& p, Queue& queue) {
    const uint32_t lot = p.forward.workers + __shfl_sync(kAllLanes, taken, 0);
    over = lot >= p.lots.count;
    if (!over) enter(p, queue, lot);
  }
  // The next step, if there is one, into `to`.
  VS_DEVICE void ask(const RingParams& p, Queue& queue, uint32_t to, uint32_t barrier) {
    if (way.left == 0) {
      if (over) return;
      if (--way.rows != 0)
        way.next_row(p);
      else
        next_lot(p, queue);
      if (over) return;
      begin_row(p, queue);
    }
    const uint32_t bytes = min(way.tiles, kRingStepTiles) * kTileBytes;
    if ((threadIdx.x & 31) == 0) {
      ptx::mbarrier_expect(barrier, bytes);
      if (bytes != 0)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
            "l"(at), "r"(bytes), "r"(barrier)
            : "memory");
    }
    at += kRingStepBytes;
    way.advance();
    if (way.left == 1) take_early(p);
  }
};

VS_DEVICE void load_half(uint32_t address, uint32_t* w) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(address)
               : "memory");
}

constexpr int kLookedUp = 10;  // of a tile's 16 exponentials, at least 8

// A plain tile. What is looked up comes with R = 0; scaling its sums is exact.
template <bool kScaled, typename S>
VS_DEVICE void add_looked_up(S& share, const uint32_t (&w)[kWords<BF16>], float scale, uint32_t base) {
  const float factor = from_bits((bits(share.magic) << 23) + 0x3f800000u);  // 2^-R, and exact
  float pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (2 * i < kTile - kLookedUp) {
      const float a = BF16::low(w[i]), b = BF16::high(w[i]);
      pair[i] = add(scaled_exp(kScaled ? mul(a, scale) : a, share.magic),
                    scaled_exp(kScaled ? mul(b, scale) : b, share.magic));
    } else {
      pair[i] = mul(Table::pair(w[i], base), factor);
    }
  }
  const float first = add(add(pair[0], pair[1]), add(pair[2], pair[3]));
  share.c.add_positive(static_cast<double>(add(first, mul(Table::sum(w + 4, base), factor))));
}

// The lanes' shares of one row, as one partial known to all. Counters move only where a lane's position is behind.
template <typename S>
VS_DEVICE Partial merge_shares(const S& share, float scale) {
  const float mine = share.y_max(scale);
  const int32_t b = static_cast<int32_t>(bits(mine));
  const int32_t ordered = is_nan(mine) ? 0x7fffffff : b ^ (b >> 31 & 0x7fffffff);
  const int32_t top = __reduce_max_sync(kAllLanes, ordered);
  Partial p = partial_identity();
  p.y_max = top == 0x7fffffff ? quiet_nan() : from_bits(static_cast<uint32_t>(top ^ (top >> 31 & 0x7fffffff)));
  if (poisons(p.y_max) || is_neg_inf(p.y_max)) return p;
  share.c.get(p.c);
  const int32_t J = limb_top(k_of_max(p.y_max));
  if (J != share.J) counters_raise(p.c, J - share.J);
#pragma unroll
  for (int i = 0; i < kLimbs; ++i) p.c[i] = sum_over_warp(p.c[i]);
  return p;
}

// The first `count` notes of a warp: whole rows end here, parts meet in the workspace.
__device__ __noinline__ void settle_lots(const RingParams& params, uint32_t count, const volatile Note* notes) {
  const uint32_t lane = threadIdx.x & 31;
  __syncwarp();
  const volatile Note& note = notes[min(lane, count - 1)];
  const uint32_t m = note.row, lot = note.lot;
  const int64_t id = note.id;
  Partial p = partial_identity();
  p.y_max = note.y_max;
  p.y_target = note.y_target;
#pragma unroll
  for (int i = 0; i < kLimbs; ++i) p.c[i] = note.c[i];

  uint32_t parts;
  const uint32_t first = params.lots.of_row(m, &parts) - params.lots.split;
  bool complete = lane < count && parts == 1, last_to_come = false;
  if (lane < count && parts > 1) {
    volatile int64_t* const to = params.shared + static_cast<int64_t>(lot - params.lots.split) * (1 + kLimbs);
    to[0] = pack_word0(p.y_max, p.y_target);
#pragma unroll
    for (int i = 0; i < kLimbs; ++i) to[1 + i] = p.c[i];
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(params.arrivals + first)
                 : "memory");
    last_to_come = before == parts - 1;
  }
  for (unsigned pending = __ballot_sync(kAllLanes, last_to_come); pending != 0; pending &= pending - 1) {
    const int source = __ffs(pending) - 1;
    const uint32_t from = __shfl_sync(kAllLanes, first, source), n = __shfl_sync(kAllLanes, parts, source);
    __syncwarp();
    Partial all = partial_identity();
    for (uint32_t i = lane; i < n; i += 32) {
      const volatile int64_t* const part = params.shared + static_cast<int64_t>(from + i) * (1 + kLimbs);
      const uint64_t word = static_cast<uint64_t>(part[0]);
      Partial one = partial_identity();
      one.y_max = from_bits(static_cast<uint32_t>(word));
      one.y_target = from_bits(static_cast<uint32_t>(word >> 32));
#pragma unroll
      for (int j = 0; j < kLimbs; ++j) one.c[j] = part[1 + j];
      partial_merge(all, one);
    }
    merge_over_warp<false>(all);
    const unsigned has = __ballot_sync(kAllLanes, !is_nan(all.y_target));
    all.y_target = __shfl_sync(kAllLanes, all.y_target, has != 0 ? __ffs(has) - 1 : 0);
    if (static_cast<int>(lane) == source) {
      params.arrivals[from] = 0;  // as it was found
      p = all;
      complete = true;
    }
  }
  if (complete) finish_row<false>(params.forward, m, p, {id, 1.0f, p.y_target, row_exists(params.forward, m)});
  __syncwarp();
}

// Which step, by what is left then, holds the target's logit; 0: none. Notes the target, which came by the queue.
VS_DEVICE uint32_t begin_part(const RingParams& p, const Way& way, const Queue& queue, volatile Note& note,
                              uint32_t index) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
  const int64_t id = queue.ids[index % kAheadOfSums], local = id - p.forward.vocab_start;
  if ((threadIdx.x & 31) == 0) {
    note.id = id;
    note.y_target = quiet_nan();
  }
  __syncwarp();
  if (local < 0 || local >= p.forward.valid / kTile * kTile || !row_exists(p.forward, way.row)) return 0;
  const uint32_t step = static_cast<uint32_t>(local) / kRingColumns - way.first;  // wraps ahead of the part
  return step < way.left ? way.left - step : 0;
}

VS_DEVICE float target_logit(uint32_t address, float scale) {
  uint16_t z;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(z) : "r"(address) : "memory");
  return mul(BF16::value(z), scale);
}

template <bool kScaled, int kWarps, int kStages>
__global__ void __launch_bounds__(32 * kWarps, 1) ring_kernel(const __grid_constant__ RingParams params) {
  static_assert(kStages < kAheadOfSums, "copies may be ahead by as many rows as there are stages");
  static_assert(kRingOffset + kWarps * kStages * kRingStepBytes <= 4 * Table::kNegative, "the ring is in the hole");
  using RingShare = Share<BF16, false, true>;
  extern __shared__ __align__(128) float table[];
  __shared__ Note notes_of_block[kWarps][kNotes];
  __shared__ Queue queue_of_block[kWarps];
  __shared__ __align__(8) uint64_t barriers[kWarps][kStages];
  const uint32_t warp = ptx::uniform(threadIdx.x / 32), lane = threadIdx.x & 31, worker = blockIdx.x * kWarps + warp;
  volatile Note* const notes = notes_of_block[warp];
  Queue& queue = queue_of_block[warp];
  uint32_t barrier = ptx::shared_address(barriers[warp]);
  uint32_t ring = ptx::shared_address(table) + kRingOffset + warp * (kStages * kRingStepBytes);

  const bool works = worker < params.forward.workers;
  Copies<kStages> copies;
  Way way = {};
  if (works) {
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(barrier + 8 * i, 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
    copies.start(params, queue, worker);
    way = copies.way;
#pragma unroll
    for (int i = 0; i < kStages; ++i) copies.ask(params, queue, ring + i * kRingStepBytes, barrier + 8 * i);
  }
  Table::fill(table, params.forward.rows.scalar_inv_temperature);  // while the first steps are on their way
  __syncthreads();
  if (!works) return;
  uint32_t base = ptx::shared_address(table) - 4 * Table::kFirst;
  asm volatile("" : "+r"(base));  // kept, not made anew in the loop
  // halves of a tile are alike: lanes 4 ... 7 of 8 read the second one first, so that no two need the same banks
  uint32_t own = ring + lane * kTileBytes + (lane & 4) * 4;
  asm volatile("" : "+r"(own), "+r"(ring), "+r"(barrier));

  const float scale = kScaled ? params.forward.rows.scalar_inv_temperature : 1.0f;
  RingShare share;
  share.clear();
  uint32_t noted = 0, stage = 0, parity = 0, lots = 0, segments = 0,
           target_left = begin_part(params, way, queue, notes[0], segments);
  while (true) {
    ptx::mbarrier_wait(barrier + 8 * stage, parity);
    const uint32_t at = own + stage * kRingStepBytes, count = min(way.tiles, kRingStepTiles);
    if (way.left == target_left && lane == 0) {  // the target's logit is passing by
      const uint32_t column = static_cast<uint32_t>(notes[noted].id - params.forward.vocab_start) % kRingColumns;
      notes[noted].y_target = target_logit(ring + stage * kRingStepBytes + 2 * column, scale);
    }
    Tile<BF16> tile[kRingTiles];
#pragma unroll
    for (int j = 0; j < kRingTiles; ++j) {
      load_half(at + j * (32 * kTileBytes), tile[j].w);
      load_half((at + j * (32 * kTileBytes)) ^ 16, tile[j].w + 4);
    }
    __syncwarp();
    copies.ask(params, queue, ring + stage * kRingStepBytes, barrier + 8 * stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
    bool slow = count != kRingStepTiles;
    if (!slow && !share.plain2(tile[0].w, tile[1].w)) {
      share.rise(scale, Table::kLimit);
      slow = !share.inside(tile[0].w, tile[1].w);
    }
    if (!slow) {
#pragma unroll
      for (int j = 0; j < kRingTiles; ++j) add_looked_up<kScaled>(share, tile[j].w, scale, base);
    } else {
#pragma unroll
      for (int j = 0; j < kRingTiles; ++j)
        if (lane + 32 * j < count) share = with_tile<BF16, false, true>(share, tile[j], scale);
    }

    way.advance();
    if (way.left != 0) continue;
    __syncwarp();
    if (params.forward.valid % kTile != 0) {
      const uint32_t steps = params.lots.at(way.lot, params.forward.steps).steps;
      share = with_edges<BF16, false, true, true>(params.forward, share, way.row, 2 * way.first,
                                                  2 * (way.first + steps), scale);
    }
    const Partial p = merge_shares(share, scale);
    if (lane == 0) {
      volatile Note& note = notes[noted];
      note.row = way.row;
      note.lot = way.lot;
      note.y_max = p.y_max;
#pragma unroll
      for (int i = 0; i < kLimbs; ++i) note.c[i] = p.c[i];
      const int64_t local = note.id - params.forward.vocab_start;
      if (local < params.forward.valid && local >= params.forward.valid / kTile * kTile && way.tiles == 0 &&
          row_exists(params.forward, way.row))
        note.y_target = mul(load_element<BF16>(row_address(params.forward, way.row) + local * BF16::kBytes), scale);
    }
    ++noted;
    bool more = true;
    if (--way.rows != 0) {
      way.next_row(params);
    } else if (++lots != copies.entered) {
      way.enter(params, queue.lots[lots % kAheadOfSums]);
    } else {
      more = false;
    }
    if (noted == kNotes || !more) {
      settle_lots(params, noted, notes);
      noted = 0;
    }
    if (!more) return;
    share.clear();
    target_left = begin_part(params, way, queue, notes[noted], ++segments);
  }
}

}  // namespace vocabshard::sm90::logits
