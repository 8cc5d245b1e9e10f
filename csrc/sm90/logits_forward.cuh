// Forward over logits that exist: one read, exact sums, any split of the work.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "sm90/check.h"
#include "sm90/logits_rows.cuh"
#include "sm90/logits_table.cuh"

namespace vocabshard::sm90::logits {

VS_DEVICE uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// A tile as it lies in memory. Where rows are not aligned these are the aligned 16-byte vectors around it, and the tile
// starts `shift` bytes into them.
template <typename T, bool kAligned>
struct Raw {
  static constexpr int kVectors = kWords<T> / 4 + (kAligned ? 0 : 1);
  uint32_t w[4 * kVectors];
  uint32_t shift;

  VS_DEVICE void set(int i, uint4 v) {
    w[4 * i] = v.x;
    w[4 * i + 1] = v.y;
    w[4 * i + 2] = v.z;
    w[4 * i + 3] = v.w;
  }

  VS_DEVICE void load(const char* p) {
    if constexpr (!kAligned) {
      shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & 15u;
      p -= shift;
    }
#pragma unroll
    for (int i = 0; i < kWords<T> / 4; ++i) set(i, load16(p + 16 * i));
    if constexpr (!kAligned) {
      if (shift != 0) set(kVectors - 1, load16(p + 16 * (kVectors - 1)));
    }
  }

  VS_DEVICE void clear() {
    shift = 0;
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) w[i] = T::kNegInf2;
  }

  VS_DEVICE void tile(uint32_t (&out)[kWords<T>]) const {
    constexpr int n = kWords<T>;
    if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < n; ++i) out[i] = w[i];
    } else {
      uint32_t a[n + 2], b[n + 1];
#pragma unroll
      for (int i = 0; i < n + 2; ++i) a[i] = (shift & 8) ? w[i + 2] : w[i];
#pragma unroll
      for (int i = 0; i < n + 1; ++i) b[i] = (shift & 4) ? a[i + 1] : a[i];
#pragma unroll
      for (int i = 0; i < n; ++i) out[i] = T::kBytes == 4 ? b[i] : __funnelshift_r(b[i], b[i + 1], (shift & 2) * 8);
    }
  }
};

// The vectors around a tile stay inside of the tensor.
template <typename T, bool kAligned>
VS_DEVICE bool readable(const ForwardParams& p, const char* at) {
  if constexpr (kAligned) return true;
  const char* const first = at - (reinterpret_cast<uintptr_t>(at) & 15u);
  return first >= p.logits && first + 16 * Raw<T, false>::kVectors <= p.logits_end;
}

// A lane's tiles on their way from memory, kAhead of them. Those that are not whole or not readable come as -inf.
template <typename T, bool kAligned, int kAhead>
struct Loads {
  Raw<T, kAligned> raw[kAhead];
  Place place;     // of the next tile to be asked for
  const char* at;  // where it lies

  VS_DEVICE void find_row(const ForwardParams& p, uint32_t step) {
    at = row_address(p, place.m) + (static_cast<int64_t>(step) * 32 + (threadIdx.x & 31)) * (kTile * T::kBytes);
  }

  VS_DEVICE void start(const ForwardParams& p, uint64_t first, const volatile uint64_t& end) {
    find_row(p, place.start(p, first, end));
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ask(p, end, raw[i]);
  }

  VS_DEVICE void ask(const ForwardParams& p, const volatile uint64_t& end, Raw<T, kAligned>& slot) {
    if (place.left > 1) {  // not the last step of a row
      if (readable<T, kAligned>(p, at))
        slot.load(at);
      else
        slot.clear();
      at += kStepColumns * T::kBytes;
      --place.left;
    } else if (place.left == 1) {
      const char* const row_end = row_address(p, place.m) + static_cast<int64_t>(p.valid) * T::kBytes;
      if (at + kTile * T::kBytes <= row_end && readable<T, kAligned>(p, at))
        slot.load(at);
      else
        slot.clear();
      place.next_row(p, end);
      if (place.left != 0) find_row(p, 0);
    }
  }
};

template <typename T>
struct Tile {
  uint32_t w[kWords<T>];

  // One element after the other, -inf from `count` on.
  VS_DEVICE void load_some(const char* p, int count) {
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
};

// Any tile. Out of line and by value: its registers are not those of the inner loop.
template <typename T, bool kEntropy, bool kTable>
VS_DEVICE Share<T, kEntropy, kTable> with_tile(Share<T, kEntropy, kTable> share, Tile<T> tile, float scale) {
  float y[kTile];
  unpack<T>(tile.w, y);
#pragma unroll
  for (int i = 0; i < kTile; ++i) y[i] = mul(y[i], scale);
  share.see(tile.w);
  share.add_any(y, scale, kTable ? Table::kLimit : 0x1p+126f);
  return share;
}

// The tiles of row m that were not readable, among steps [begin, end) of the row: its first, its last whole one, and
// what is left over.
template <typename T, bool kEntropy, bool kAligned, bool kTable>
__device__ __noinline__ Share<T, kEntropy, kTable> with_edges(const ForwardParams& p, Share<T, kEntropy, kTable> share,
                                                              uint32_t m, uint32_t begin, uint32_t end, float scale) {
  const int lane = threadIdx.x & 31;
  const int32_t whole = p.valid / kTile, tile = lane == 0 ? whole : lane == 1 ? whole - 1 : 0;
  if (lane > (kAligned ? 0 : 2) || tile < 0 || (lane == 2 && whole < 2)) return share;
  const uint32_t step = static_cast<uint32_t>(tile) / 32;
  const int32_t columns = p.valid - tile * kTile;
  const char* const at = row_address(p, m) + static_cast<int64_t>(tile) * (kTile * T::kBytes);
  if (step < begin || step >= end || columns == 0 || (columns >= kTile && readable<T, kAligned>(p, at))) return share;
  Tile<T> some;
  some.load_some(at, min(columns, kTile));
  return with_tile<T, kEntropy, kTable>(share, some, scale);
}

template <typename Step, typename Slot, int... kSlots>
VS_DEVICE bool all_slots(Step& step, Slot* slots, std::integer_sequence<int, kSlots...>) {
  return (step(slots[kSlots]) && ...);
}

// kTable: bf16 and one scale for all rows.
template <typename T, bool kEntropy, bool kScaled, bool kAligned, bool kTable, int kWarps, int kBlocks, int kAhead>
__global__ void __launch_bounds__(32 * kWarps, kBlocks) forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(16) float table[];
  __shared__ int64_t notes_of_block[kWarps][kNotes][kPartialWords];
  __shared__ uint64_t ends[kWarps];  // read where rows end: the inner loop's registers are the tile's
  const uint32_t warp = threadIdx.x / 32, worker = blockIdx.x * kWarps + warp;
  auto* const notes = notes_of_block[warp];
  const volatile uint64_t& end = ends[warp];

  Place place = {};
  Loads<T, kAligned, kAhead> loads;
  if (worker < params.workers) {
    const Deal deal(params);
    const uint64_t first = deal.begin(worker), last = deal.begin(worker + 1);
    if ((threadIdx.x & 31) == 0) ends[warp] = last;
    __syncwarp();
    place.start(params, first, last);
    loads.start(params, first, end);
  }
  uint32_t base = 0;
  if constexpr (kTable) {
    Table::fill(table, params.rows.scalar_inv_temperature);  // while the first tiles are on their way
    __syncthreads();
    base = static_cast<uint32_t>(__cvta_generic_to_shared(table)) - 4 * Table::kFirst;
    asm volatile("" : "+r"(base));  // kept, not made anew in the loop
  }
  if (place.left == 0) return;

  float scale = row_scale<kScaled>(params, place.m);
  Share<T, kEntropy, kTable> share;
  share.clear();
  int noted = 0;
  auto step = [&](Raw<T, kAligned>& slot) {  // false: that was the last one
    Tile<T> tile;
    slot.tile(tile.w);
    loads.ask(params, end, slot);  // on its way while this one is worked on
    if (!kEntropy && share.plain(tile.w)) {
      constexpr int kComputed = kTable ? kTile / 2 : kTile;
      uint32_t w[kComputed * T::kBytes / 4];
      float y[kComputed];
#pragma unroll
      for (int i = 0; i < kComputed * T::kBytes / 4; ++i) w[i] = tile.w[i];
      unpack<T>(w, y);
#pragma unroll
      for (int i = 0; i < kComputed; ++i) y[i] = kScaled ? mul(y[i], scale) : y[i];
      if constexpr (kTable)
        share.add_halves(y, Table::sum(tile.w + kWords<T> / 2, base));
      else
        share.add_tile(y);
    } else {
      share = with_tile<T, kEntropy, kTable>(share, tile, scale);
    }

    if (--place.left != 0) return true;
    if (!kAligned || params.valid % kTile != 0) {
      const uint64_t row = static_cast<uint64_t>(place.m) * params.steps;
      const uint64_t first = Deal(params).begin(worker), last = end;
      share = with_edges<T, kEntropy, kAligned, kTable>(
          params, share, place.m, static_cast<uint32_t>(first > row ? first - row : 0),
          static_cast<uint32_t>(min(last - row, static_cast<uint64_t>(params.steps))), scale);
    }
    Partial p = share.partial(scale);
    merge_over_warp<kEntropy>(p);
    if ((threadIdx.x & 31) == 0) put_partial<kEntropy>(notes[noted], p);
    ++noted;
    place.next_row(params, end);
    if (noted == kNotes || place.left == 0) {
      settle<T, kEntropy, kScaled>(params, worker, place.m - noted, noted, notes);
      noted = 0;
    }
    if (place.left == 0) return false;
    share.clear();
    scale = row_scale<kScaled>(params, place.m);
    return true;
  };
  while (all_slots(step, loads.raw, std::make_integer_sequence<int, kAhead>())) {
  }
}

constexpr int kMostWorkers = 32;  // of a multiprocessor

struct Device {
  int multiprocessors, shared_bytes;  // shared memory that a block may have
  int capability;                     // its major number
};

inline Device current_device() {
  constexpr int kDevices = 64;
  static Device known[kDevices];  // a racing write puts the same numbers
  int index = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  if (index < kDevices && known[index].multiprocessors != 0) return known[index];
  Device device = {};
  check(cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
        "shared memory of a block");
  check(cudaDeviceGetAttribute(&device.capability, cudaDevAttrComputeCapabilityMajor, index), "compute capability");
  check(cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index), "multiprocessor count");
  if (index < kDevices) known[index] = device;
  return device;
}

inline int multiprocessors() { return current_device().multiprocessors; }

inline int64_t most_workers() { return static_cast<int64_t>(multiprocessors()) * kMostWorkers; }

// Parts of rows that a launch by lots may have.
inline int64_t most_parts() { return 3 * most_workers(); }

// Leading words of the workspace that are zero between launches: arrivals at shared rows of launches of the one kind,
// then a counter of lots and arrivals of the other kind.
inline int64_t zeroed_words() { return most_workers() + 2 + most_parts(); }

template <typename T, bool kEntropy, bool kScaled, bool kAligned, bool kTable, int kWarps, int kBlocks, int kAhead>
void launch_forward(ForwardParams params, void* workspace, cudaStream_t stream) {
  static_assert(kWarps * kBlocks <= kMostWorkers, "the workspace has no more");
  params.steps = max(1u, (static_cast<uint32_t>(params.valid) + kStepColumns - 1) / kStepColumns);
  params.workers = static_cast<uint32_t>(
      min(params.outputs * params.steps, static_cast<int64_t>(multiprocessors()) * kWarps * kBlocks));
  params.arrivals = static_cast<uint32_t*>(workspace);
  params.shared = reinterpret_cast<int64_t*>(params.arrivals + zeroed_words());
  const auto kernel = forward_kernel<T, kEntropy, kScaled, kAligned, kTable, kWarps, kBlocks, kAhead>;
  constexpr int kShared = kTable ? Table::kBytes : 0;
  if (kShared > 0)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
          "shared memory of the forward over logits");
  kernel<<<(params.workers + kWarps - 1) / kWarps, 32 * kWarps, kShared, stream>>>(params);
  check_launch("forward over logits");
}

}  // namespace vocabshard::sm90::logits
