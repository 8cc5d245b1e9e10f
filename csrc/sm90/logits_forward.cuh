// Forward over logits that exist: one read, exact sums, any split of the work.
//
// The M rows are cut into steps of 16 columns a thread; all steps, row after row, are dealt evenly to the blocks, so a
// block has a few whole rows and at most two that it shares with its neighbours. Partial sums of shared rows meet in
// the workspace, and whichever block comes last finishes the row: any order gives the same bytes.
#pragma once

#include <cuda_runtime.h>

#include "sm90/logits.h"
#include "sm90/logits_tile.cuh"

namespace vocabshard::logits {

constexpr unsigned kAllLanes = 0xffffffffu;

struct ForwardParams {
  const void* logits;
  int64_t row_stride;     // elements
  int64_t logits_rows;    // N
  const int64_t* source;  // row of logits that an output row reads; nullptr: the same
  int64_t outputs;        // M
  int64_t valid;
  uint32_t tiles;  // of a row
  uint32_t steps;  // of a row, at least 1
  RowInputs rows;
  int64_t vocab_start;
  int64_t* records;  // nullptr: fold
  LogitsFold fold;
  uint32_t* arrivals;  // one a block
  int64_t* shared;     // two partials a block
};

constexpr int kPartialWords = 1 + 2 * kLimbs;

// ---- loads ----

VS_DEVICE uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Words of a tile as they lie in memory. Where rows are not aligned they are the aligned 16-byte vectors around it, and
// `shift` says where it starts.
template <typename T, bool kAligned>
struct Raw {
  static constexpr int kVectors = kWords<T> / 4 + (kAligned ? 0 : 1);
  uint32_t w[4 * kVectors];

  VS_DEVICE void set(int i, uint4 v) {
    w[4 * i] = v.x;
    w[4 * i + 1] = v.y;
    w[4 * i + 2] = v.z;
    w[4 * i + 3] = v.w;
  }

  // bytes: how far into the first vector the tile starts, the same for all tiles of a row.
  VS_DEVICE void load(const char* p, uint32_t bytes) {
    if constexpr (!kAligned) p -= bytes;
#pragma unroll
    for (int i = 0; i < kWords<T> / 4; ++i) set(i, load16(p + 16 * i));
    if constexpr (!kAligned) {
      if (bytes != 0) set(kVectors - 1, load16(p + 16 * (kVectors - 1)));
    }
  }

  // One element after the other, -inf from `count` on; as if aligned.
  VS_DEVICE void load_some(const char* p, int64_t count) {
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) {
      if constexpr (T::kBytes == 4) {
        w[i] = i < count ? *reinterpret_cast<const uint32_t*>(p + 4 * i) : T::kNegInf2;
      } else {
        const uint32_t low = 2 * i < count ? *reinterpret_cast<const uint16_t*>(p + 4 * i) : T::kNegInf2 & 0xffffu;
        const uint32_t high = 2 * i + 1 < count ? *reinterpret_cast<const uint16_t*>(p + 4 * i + 2) : T::kNegInf2 >> 16;
        w[i] = low | high << 16;
      }
    }
  }

  VS_DEVICE void tile(uint32_t bytes, uint32_t (&out)[kWords<T>]) const {
    if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < kWords<T>; ++i) out[i] = w[i];
    } else {
      constexpr int n = kWords<T>;
      uint32_t a[n + 2], b[n + 1];
#pragma unroll
      for (int i = 0; i < n + 2; ++i) a[i] = (bytes & 8) ? w[i + 2] : w[i];
#pragma unroll
      for (int i = 0; i < n + 1; ++i) b[i] = (bytes & 4) ? a[i + 1] : a[i];
      const uint32_t half = (bytes & 2) * 8;
#pragma unroll
      for (int i = 0; i < n; ++i) out[i] = T::kBytes == 4 ? b[i] : __funnelshift_r(b[i], b[i + 1], half);
    }
  }
};

template <typename T>
VS_DEVICE float load_one(const void* p) {
  if constexpr (T::kBytes == 4)
    return *static_cast<const float*>(p);
  else
    return T::value(*static_cast<const uint16_t*>(p));
}

// ---- partials of many threads ----

VS_DEVICE int64_t sum_over_warp(int64_t c) {  // |c| < 2^50
  const uint32_t low = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(c) & 0xffffffu);
  const int32_t high = __reduce_add_sync(kAllLanes, static_cast<int32_t>(c >> 24));
  return (static_cast<int64_t>(high) << 24) + low;
}

// All lanes' partials into one, known to every lane. Targets are not looked at.
template <bool kEntropy>
VS_DEVICE void merge_over_warp(Partial& p) {
  const int32_t b = static_cast<int32_t>(bits(p.y_max));
  const int32_t ordered = is_nan(p.y_max) ? 0x7fffffff : b ^ (b >> 31 & 0x7fffffff);
  const int32_t top = __reduce_max_sync(kAllLanes, ordered);
  partial_raise(p, top == 0x7fffffff ? quiet_nan() : from_bits(static_cast<uint32_t>(top ^ (top >> 31 & 0x7fffffff))));
  if (poisons(p.y_max)) return;
#pragma unroll
  for (int i = 0; i < kLimbs; ++i) {
    p.c[i] = sum_over_warp(p.c[i]);
    if constexpr (kEntropy) p.u[i] = sum_over_warp(p.u[i]);
  }
}

// Partials in shared or global memory, words `stride` apart.
template <bool kEntropy>
VS_DEVICE void put_partial(volatile int64_t* to, const Partial& p) {
  to[0] = static_cast<int64_t>(bits(p.y_max));
#pragma unroll
  for (int i = 0; i < kLimbs; ++i) {
    to[1 + i] = p.c[i];
    if constexpr (kEntropy) to[1 + kLimbs + i] = p.u[i];
  }
}

template <bool kEntropy>
VS_DEVICE Partial get_partial(const volatile int64_t* from) {
  Partial p = partial_identity();
  p.y_max = from_bits(static_cast<uint32_t>(from[0]));
#pragma unroll
  for (int i = 0; i < kLimbs; ++i) {
    p.c[i] = from[1 + i];
    if constexpr (kEntropy) p.u[i] = from[1 + kLimbs + i];
  }
  return p;
}

// ---- the end of a row ----

VS_DEVICE int64_t source_row(const ForwardParams& params, int64_t m) { return params.source ? params.source[m] : m; }

template <typename T, bool kScaled>
VS_DEVICE float row_scale(const ForwardParams& params, int64_t m) {
  if constexpr (!kScaled) return 1.0f;
  return params.rows.inv_temperature ? params.rows.inv_temperature[m] : params.rows.scalar_inv_temperature;
}

// By one lane.
template <typename T, bool kEntropy, bool kScaled>
__device__ __noinline__ void finish_row(const ForwardParams& params, uint32_t m, Partial p) {
  const float scale = row_scale<T, kScaled>(params, m);
  if (kScaled && is_nan(scale) && params.valid > 0) p.y_max = scale;  // every y is NaN
  const int64_t id = params.rows.target_ids[m], local = id - params.vocab_start;
  if (local >= 0 && local < params.valid) {
    const int64_t at = source_row(params, m) * params.row_stride + local;
    p.y_target = load_one<T>(static_cast<const char*>(params.logits) + at * T::kBytes);
    if constexpr (kScaled) p.y_target = mul(p.y_target, scale);
  }
  partial_finish(p);
  p.y_max = add(p.y_max, 0.0f);  // a maximum of zeros is +0, in whatever order they came
  if (params.records) {
    record_store<kEntropy>(params.records + m, params.outputs, p);
    return;
  }
  const LogitsFold& fold = params.fold;
  const int target = id == fold.ignore_index                ? kTargetIgnored
                     : id >= 0 && id < fold.real_vocab_size ? kTargetScored
                                                            : kTargetInvalid;
  const Folded f = fold_finish<kEntropy>(p, target, fold.invalid_is_nan);
  fold.out.logp[m] = f.logp;
  fold.out.lse[m] = f.lse;
  if constexpr (kEntropy) fold.out.entropy[m] = f.entropy;
  fold.out.lse2_int[m] = f.lse2_int;
  fold.out.lse2_frac[m] = f.lse2_frac;
  fold.out.maximum[m] = p.y_max;
}

// Where the blocks' shares begin: block b takes steps [begin(b), begin(b + 1)) of all.
struct Deal {
  uint64_t total;
  uint32_t blocks;

  VS_DEVICE uint64_t begin(uint32_t b) const { return total / blocks * b + total % blocks * b / blocks; }

  VS_DEVICE uint32_t owner(uint64_t step) const {
    uint32_t b = static_cast<uint32_t>(static_cast<double>(step) * blocks / static_cast<double>(total));
    b = min(b, blocks - 1);
    while (begin(b) > step) --b;
    while (begin(b + 1) <= step) ++b;
    return b;
  }
};

// Who a thread is: kGroups groups of kWarps warps a block, groups numbered through the grid.
template <int kWarps, int kGroups>
struct Group {
  static constexpr uint32_t kThreads = 32 * kWarps;
  VS_DEVICE static uint32_t thread() { return kGroups == 1 ? threadIdx.x : threadIdx.x % kThreads; }
  VS_DEVICE static uint32_t index() {
    return kGroups == 1 ? blockIdx.x : blockIdx.x * kGroups + threadIdx.x / kThreads;
  }
  VS_DEVICE static uint32_t count() { return gridDim.x * kGroups; }
  VS_DEVICE static void sync() {
    if constexpr (kGroups == 1)
      __syncthreads();
    else
      asm volatile("barrier.cta.sync %0, %1;" ::"r"(1 + threadIdx.x / kThreads), "n"(kThreads) : "memory");
  }
};

// A row that several blocks share: by one warp of each. The last one finishes it.
template <typename T, bool kEntropy, bool kScaled>
__device__ __noinline__ void share_row(const ForwardParams& params, uint32_t index, uint32_t count, uint32_t m,
                                       Partial p) {
  const Deal deal{static_cast<uint64_t>(params.outputs) * params.steps, count};
  const uint64_t row_begin = static_cast<uint64_t>(m) * params.steps;
  const uint32_t first = deal.owner(row_begin), last = deal.owner(row_begin + params.steps - 1);
  const int lane = threadIdx.x & 31;
  unsigned before = 0;
  if (lane == 0) {
    // a block's slots: 0 the row it begins in, 1 the row it ends in; either may be missing
    const bool begins_here = deal.begin(index) <= row_begin;
    put_partial<kEntropy>(params.shared + (2 * static_cast<int64_t>(index) + begins_here) * kPartialWords, p);
    __threadfence();
    before = atomicAdd(params.arrivals + first, 1u);
  }
  before = __shfl_sync(kAllLanes, before, 0);
  if (before != last - first) return;
  __threadfence();
  p = partial_identity();
  for (uint32_t b = first + lane; b <= last; b += 32) {
    const bool begins_there = deal.begin(b) <= row_begin;
    Partial other = get_partial<kEntropy>(params.shared + (2 * static_cast<int64_t>(b) + begins_there) * kPartialWords);
    partial_merge(p, other);
  }
  merge_over_warp<kEntropy>(p);
  if (lane == 0) {
    params.arrivals[first] = 0;  // as it was found
    finish_row<T, kEntropy, kScaled>(params, m, p);
  }
}

// ---- the kernel ----

// A block's way through its rows, kept in shared memory so that the inner loop's registers are the tile's.
struct Place {
  uint32_t m;      // output row
  uint32_t begin;  // first step of this block in it
  uint32_t end;
  uint32_t left;  // steps in later rows
};

// A warp's way through its tiles of one row: tile `lane` of every step of the block is one thread's.
template <typename T, bool kAligned, typename G>
struct Walk {
  static constexpr uint32_t kStep = G::kThreads;  // tiles of a step
  const char* at;                                 // this thread's next tile
  int32_t left;    // twice the full steps that hold tiles of this warp, plus one if a last one is not full
  bool edge;       // the vectors around a tile may lie outside of the tensor
  uint32_t bytes;  // alignment of the row
  uint32_t shift;  // that of what is in raw
  Raw<T, kAligned> raw;

  VS_DEVICE static uint32_t own_steps(const ForwardParams& params) {
    const uint32_t before = G::thread() & ~31u;  // tiles of a step before this warp's
    return before < params.tiles ? (params.tiles - before + kStep - 1) / kStep : 0;
  }

  VS_DEVICE void start(const ForwardParams& params, uint32_t m, uint32_t begin, uint32_t end) {
    const uint32_t steps = own_steps(params), last = min(end, steps), count = last > begin ? last - begin : 0;
    const bool tail = count != 0 && last == steps &&
                      (steps - 1) * kStep + (G::thread() & ~31u) + 32 > static_cast<uint64_t>(params.valid) / kTile;
    left = 2 * count - tail;
    const int64_t n = source_row(params, m);
    at = static_cast<const char*>(params.logits) + n * params.row_stride * T::kBytes;
    if constexpr (!kAligned) {
      bytes = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at)) & 15u;
      edge = n == 0 || n == params.logits_rows - 1;
    }
    at += static_cast<int64_t>(begin * static_cast<uint64_t>(kStep) + G::thread()) * (kTile * T::kBytes);
    fetch(params);
  }

  // The tile at `at` is on its way.
  VS_DEVICE void fetch(const ForwardParams& params) {
    if (left > 1)
      fetch_whole(params);
    else if (left == 1)
      fetch_tail(params);
  }

  VS_DEVICE void next() {
    left -= 2;
    at += static_cast<int64_t>(kStep) * kTile * T::kBytes;
    asm volatile("" : "+l"(at));  // one pointer, not one for every way through the loop
  }

  VS_DEVICE void fetch_whole(const ForwardParams& params) {
    if constexpr (!kAligned) {
      shift = bytes;
      if (edge) {
        const char* begin = static_cast<const char*>(params.logits);
        const char* end = begin + ((params.logits_rows - 1) * params.row_stride + params.valid) * T::kBytes;
        const char* first = at - bytes;
        if (first < begin || (bytes != 0 && first + 16 * Raw<T, kAligned>::kVectors > end)) {
          raw.load_some(at, kTile);
          shift = 0;
          return;
        }
      }
    }
    raw.load(at, bytes);
#if defined(VS_PREFETCH)
    if (left > 2 * VS_PREFETCH + 1)
      asm volatile(
          "prefetch.global.L2 [%0];" ::"l"(at + VS_PREFETCH * static_cast<int64_t>(kStep) * kTile * T::kBytes));
#endif
  }

  VS_DEVICE void fetch_tail(const ForwardParams& params) {
    shift = 0;
    const int64_t tile = static_cast<int64_t>(own_steps(params) - 1) * kStep + G::thread();
    raw.load_some(at, max(min(params.valid - tile * kTile, static_cast<int64_t>(kTile)), static_cast<int64_t>(0)));
  }
};

// A block is kGroups groups of kWarps warps, each with a deal of its own; several only where they share a table.
template <typename T, bool kEntropy, bool kScaled, bool kAligned, int kLookups, int kWarps, int kGroups, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps * kGroups, kBlocks)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using G = Group<kWarps, kGroups>;
  extern __shared__ __align__(16) float table[];
  __shared__ int64_t partials[kGroups][2][kWarps][kPartialWords];
  __shared__ volatile Place places[kGroups * kWarps];  // every warp's own copy
  volatile Place& place = places[threadIdx.x / 32];
  if constexpr (kLookups > 0) {
    Table<T>::fill(table, params.rows.scalar_inv_temperature);
    __syncthreads();
  }
  uint32_t table_base = kLookups > 0 ? static_cast<uint32_t>(__cvta_generic_to_shared(table)) : 0;
  asm volatile("" : "+r"(table_base));  // kept, not made anew in the loop
  {
    const Deal deal{static_cast<uint64_t>(params.outputs) * params.steps, G::count()};
    const uint64_t first = deal.begin(G::index());
    const uint32_t left = static_cast<uint32_t>(deal.begin(G::index() + 1) - first);
    if (left == 0) return;
    place.m = static_cast<uint32_t>(first / params.steps);
    const uint32_t begin = static_cast<uint32_t>(first % params.steps), end = min(params.steps, begin + left);
    place.begin = begin;
    place.end = end;
    place.left = left - (end - begin);
  }
  __syncwarp();

  Walk<T, kAligned, G> walk;
  walk.start(params, place.m, place.begin, place.end);
  for (uint32_t turn = 0;; ++turn) {
    const float scale = row_scale<T, kScaled>(params, place.m);
    Share<T, kEntropy, kLookups> share;
    share.clear();

    bool more = walk.left > 0;
    if (!more && place.left != 0) walk.start(params, place.m + 1, 0, min(params.steps, place.left));
    while (more) {
      uint32_t w[kWords<T>], place_of[kTile];
      float y[kTile];
      walk.raw.tile(walk.shift, w);
      share.see(w);
      const uint32_t special = kEntropy ? 1 : share.special(w);
      unpack<T, kTile - kLookups>(w, y);
      table_places<T, kLookups>(w, table_base, place_of);
      // the next tile is on its way while this one is worked on
      walk.next();
      if (walk.left > 1) {
        walk.fetch_whole(params);
      } else if (walk.left == 1) {
        walk.fetch_tail(params);
      } else {
        more = false;
        const uint32_t left = place.left;
        if (left != 0) walk.start(params, place.m + 1, 0, min(params.steps, left));
      }
      if constexpr (kScaled) {
#pragma unroll
        for (int i = 0; i < kTile - kLookups; ++i) y[i] = mul(y[i], scale);
      }
      if (!kEntropy && special == 0) {
        if constexpr (kLookups > 0)
          share.add_looked_up(y, place_of);
        else
          share.add(y);
      } else {
        if constexpr (kLookups > 0) {
#pragma unroll
          for (int i = kTile - kLookups; i < kTile; ++i) {
            y[i] = T::value((place_of[i] - table_base) >> 2);
            if constexpr (kScaled) y[i] = mul(y[i], scale);
          }
        }
        if (share.prepare(y, scale)) {
          if constexpr (kEntropy)
            share.add_with_entropy(y);
          else
            share.add(y);
        }
      }
    }

    Partial p = share.partial(scale);
    merge_over_warp<kEntropy>(p);
    const int warp = G::thread() / 32, lane = threadIdx.x & 31;
    bool finisher = true;
    if constexpr (kWarps > 1) {
      int64_t (*slots)[kPartialWords] = partials[threadIdx.x / G::kThreads][turn & 1];  // the other may still be read
      if (lane == 0) put_partial<kEntropy>(slots[warp], p);
      G::sync();
      finisher = warp == turn % kWarps;
      if (finisher) {
        p = lane < kWarps ? get_partial<kEntropy>(slots[lane]) : partial_identity();
        merge_over_warp<kEntropy>(p);
      }
    }
    if (finisher) {
      if (place.begin == 0 && place.end == params.steps) {
        if (lane == 0) finish_row<T, kEntropy, kScaled>(params, place.m, p);
      } else {
        share_row<T, kEntropy, kScaled>(params, G::index(), G::count(), place.m, p);
      }
      __syncwarp();
    }
    const uint32_t m = place.m, left = place.left;
    if (left == 0) return;
    __syncwarp();
    place.m = m + 1;
    place.begin = 0;
    place.end = min(params.steps, left);
    place.left = left - min(params.steps, left);
    __syncwarp();
  }
}

}  // namespace vocabshard::logits
