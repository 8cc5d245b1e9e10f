// Forward over logits that exist, by loads into registers: any type, alignment, temperature, entropy, and few rows.
//
// A worker is a block; a step is a tile of 16 columns for each of its threads. logits_ring.cuh is the faster one for
// large problems of 16-bit logits.
#pragma once

#include "sm90/logits_rows.cuh"

namespace vocabshard::logits {

// A warp's way through its tiles of one row: tile `lane` of every step of the block is one thread's.
template <typename T, bool kAligned, int kWarps>
struct Walk {
  static constexpr uint32_t kStep = 32 * kWarps;  // tiles of a step
  const char* at;                                 // this thread's next tile
  int32_t left;    // twice the full steps that hold tiles of this warp, plus one if a last one is not full
  bool edge;       // the vectors around a tile may lie outside of the tensor
  uint32_t bytes;  // alignment of the row
  uint32_t shift;  // that of what is in raw
  Raw<T, kAligned> raw;

  VS_DEVICE static uint32_t own_steps(const ForwardParams& params) {
    const uint32_t before = threadIdx.x & ~31u;  // tiles of a step before this warp's
    const uint32_t tiles = static_cast<uint32_t>((params.valid + kTile - 1) / kTile);
    return before < tiles ? (tiles - before + kStep - 1) / kStep : 0;
  }

  VS_DEVICE void start(const ForwardParams& params, uint32_t m, uint32_t begin, uint32_t end) {
    const uint32_t steps = own_steps(params), last = min(end, steps), count = last > begin ? last - begin : 0;
    const bool tail = count != 0 && last == steps &&
                      (steps - 1) * kStep + (threadIdx.x & ~31u) + 32 > static_cast<uint64_t>(params.valid) / kTile;
    left = 2 * count - tail;
    const int64_t n = source_row(params, m);
    at = row_address(params, n, T::kBytes);
    if constexpr (!kAligned) {
      bytes = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at)) & 15u;
      edge = n == 0 || n == params.logits_rows - 1;
    }
    at += static_cast<int64_t>(begin * static_cast<uint64_t>(kStep) + threadIdx.x) * (kTile * T::kBytes);
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
          load_some<T>(at, kTile, raw.w);
          shift = 0;
          return;
        }
      }
    }
    raw.load(at, bytes);
  }

  VS_DEVICE void fetch_tail(const ForwardParams& params) {
    shift = 0;
    const int64_t tile = static_cast<int64_t>(own_steps(params) - 1) * kStep + threadIdx.x;
    const int64_t columns = params.valid - tile * kTile;
    load_some<T>(at, static_cast<int>(max(min(columns, static_cast<int64_t>(kTile)), static_cast<int64_t>(0))), raw.w);
  }
};

template <typename T, bool kEntropy, bool kScaled, bool kAligned, int kWarps, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps, kBlocks) forward_kernel(const __grid_constant__ ForwardParams params) {
  __shared__ int64_t partials[2][kWarps][kPartialWords];
  // kept here, not in registers: those of the inner loop are the tile's
  __shared__ volatile Place places[kWarps];
  __shared__ Target targets[kWarps];
  volatile Place& place = places[threadIdx.x / 32];
  Target& target = targets[threadIdx.x / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  {
    Place first;
    if (!first.start(params, blockIdx.x)) return;
    place.m = first.m;
    place.begin = first.begin;
    place.end = first.end;
    place.left = first.left;
  }
  __syncwarp();

  Walk<T, kAligned, kWarps> walk;
  walk.start(params, place.m, place.begin, place.end);
  for (uint32_t turn = 0;; ++turn) {
    const float scale = row_scale<kScaled>(params, place.m);
    const bool finisher = warp == static_cast<int>(turn % kWarps);
    if (finisher && lane == 0) target = load_target<T, kScaled>(params, place.m);
    Share<T, kEntropy> share;
    share.clear();

    bool more = walk.left > 0;
    if (!more && place.left != 0) walk.start(params, place.m + 1, 0, min(params.steps, place.left));
    while (more) {
      uint32_t w[kWords<T>];
      float y[kTile];
      walk.raw.tile(walk.shift, w);
      share.see(w);
      const uint32_t rises = kEntropy ? 1 : share.rises();
      if constexpr (!kEntropy) share.clamp(w);
      unpack<T>(w, y);
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
        for (int i = 0; i < kTile; ++i) y[i] = mul(y[i], scale);
      }
      if (rises == 0) {
        share.add(y);
      } else if (share.prepare(y, scale)) {
        if constexpr (kEntropy)
          share.add_with_entropy(y);
        else
          share.add(y);
      }
    }

    Partial p = share.partial(scale);
    merge_over_warp<kEntropy>(p);
    int64_t (*slots)[kPartialWords] = partials[turn & 1];  // the other may still be read
    if (lane == 0) put_partial<kEntropy>(slots[warp], p);
    __syncthreads();
    if (finisher) {
      p = lane < kWarps ? get_partial<kEntropy>(slots[lane]) : partial_identity();
      merge_over_warp<kEntropy>(p);
      if (place.begin == 0 && place.end == params.steps) {
        if (lane == 0) finish_row<kEntropy, kScaled>(params, place.m, p, target);
      } else {
        share_row<kEntropy, kScaled>(params, blockIdx.x, place.m, p, target);
      }
    }
    __syncwarp();
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
