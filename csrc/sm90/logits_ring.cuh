// Forward over 16-bit logits that exist, at memory speed: large problems, no entropy, one temperature for all rows.
//
// One block a multiprocessor. A worker is a warp; a step is one tile of 16 columns for each lane, 1 KiB, copied to
// shared memory kStages steps ahead, so that neither the end of a row nor a wait for a bank keeps memory idle. Half of
// the exponentials come from a table in shared memory; the ring lies in the table's hole, and behind it what does not
// fit.
#pragma once

#include "sm90/logits_rows.cuh"

namespace vocabshard::logits {

struct RingParams {
  ForwardParams forward;
  uint32_t full_steps;    // of a row: 32 whole tiles
  uint32_t tail_tiles;    // whole tiles of the step after them
  uint32_t tail_columns;  // columns of the tile after those, less than kTile
};

VS_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

VS_DEVICE uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

VS_DEVICE void copy16(uint32_t to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

VS_DEVICE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kLater>  // groups of copies that may still be on their way
VS_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

template <typename T, bool kAligned, int kWarps, int kStages>
struct RingLayout {
  static constexpr uint32_t kStep = 32 * kTile * T::kBytes;        // bytes
  static constexpr uint32_t kStage = kStep + (kAligned ? 0 : 16);  // from the vector that holds the first byte on
  static_assert(kStage * kStages <= 32 * 1024, "stages are counted by offset >> 10");
  static constexpr uint32_t kOfWarp = kStages * kStage;
  static constexpr uint32_t kFit = (Table<T>::kHoleEnd - Table<T>::kHole) / kOfWarp;
  static constexpr uint32_t kInHole = kFit < kWarps ? kFit : kWarps;
  static constexpr uint32_t kBytes = Table<T>::kBytes + (kWarps - kInHole) * kOfWarp;

  VS_DEVICE static uint32_t offset(uint32_t warp) {
    return warp < kInHole ? Table<T>::kHole + warp * kOfWarp : Table<T>::kBytes + (warp - kInHole) * kOfWarp;
  }
};

// A warp's ring and what it will copy next. Each lane copies vectors `lane` and `lane` + 32 of a stage.
template <typename T, bool kAligned, int kWarps, int kStages>
struct Ring {
  using Layout = RingLayout<T, kAligned, kWarps, kStages>;
  uint32_t own;            // address of this lane's vector of stage 0
  uint32_t first, second;  // and of the halves of its tile
  uint32_t now, before;    // offset of the current stage; of the last one, to be filled next
  uint32_t missing;        // stages that could not be copied, bit by bit
  const char* at;          // this lane's vector of the next step
  uint32_t plain;          // steps to come that are whole; then
  uint32_t careful;        // those that need care, of this row; then the next row
  Place place;

  // The way through the steps of place: `at`, plain, careful.
  VS_DEVICE void locate(const RingParams& params) {
    const ForwardParams& p = params.forward;
    const int64_t n = source_row(p, place.m);
    const uint32_t whole = min(place.end, params.full_steps);
    plain = whole > place.begin ? whole - place.begin : 0;
    at = row_address(p, n, T::kBytes);
    if constexpr (!kAligned) {
      at -= reinterpret_cast<uintptr_t>(at) & 15u;
      if (n == 0 || n == p.logits_rows - 1) plain = 0;  // vectors may reach out of the tensor
    }
    careful = place.end - place.begin - plain;
    at += static_cast<int64_t>(place.begin) * Layout::kStep + (threadIdx.x & 31) * 16;
  }

  VS_DEVICE void copy_plain() {
    copy16(own + before, at);
    copy16(own + before + 512, at + 512);
    if (!kAligned && (threadIdx.x & 31) == 0) copy16(own + before + 1024, at + 1024);
    if constexpr (!kAligned) missing &= ~(1u << (before >> 10));
    at += Layout::kStep;
    --plain;
  }

  VS_DEVICE void copy_careful(const RingParams& params) {
    const ForwardParams& p = params.forward;
    const uint32_t lane = threadIdx.x & 31, step = place.end - careful;
    const uint32_t tiles = step < params.full_steps ? 32u : params.tail_tiles;
    uint32_t vectors = tiles * (kTile * T::kBytes / 16);
    if constexpr (!kAligned) {
      vectors += tiles != 0;
      const char* from = at - lane * 16;
      const char* begin = static_cast<const char*>(p.logits);
      const char* end = begin + ((p.logits_rows - 1) * p.row_stride + p.valid) * T::kBytes;
      const bool out = tiles != 0 && (from < begin || from + vectors * 16 > end);
      if (out) vectors = 0;
      missing = (missing & ~(1u << (before >> 10))) | (out ? 1u << (before >> 10) : 0);
    }
#pragma unroll 1
    for (uint32_t i = lane; i < vectors; i += 32) copy16(own + before + (i - lane) * 16, at + (i - lane) * 16);
    at += Layout::kStep;
    --careful;
  }

  // Copies the next step, if there is one, to the stage that was read last.
  VS_DEVICE void refill(const RingParams& params) {
    if (plain == 0) {
      if (careful == 0 && place.next(params.forward.steps)) locate(params);
      if (plain != 0)
        copy_plain();
      else if (careful != 0)
        copy_careful(params);
    } else {
      copy_plain();
    }
    end_of_copies();
  }

  VS_DEVICE static uint32_t next(uint32_t offset) {
    return offset == (kStages - 1) * Layout::kStage ? 0 : offset + Layout::kStage;
  }

  VS_DEVICE void start(const RingParams& params, uint32_t table, uint32_t index) {
    const uint32_t lane = threadIdx.x & 31, stages = table + Layout::offset(threadIdx.x / 32);
    own = stages + lane * 16;
    first = stages + lane * (kTile * T::kBytes);
    if constexpr (kAligned) first += (lane & 4) * 4;
    second = first ^ 16;
    asm volatile("" : "+r"(own), "+r"(first), "+r"(second));  // kept, not made anew in the loop
    plain = careful = missing = before = 0;
    if (place.start(params.forward, index)) locate(params);
    for (int i = 0; i < kStages - 1; ++i) {
      refill(params);
      before += Layout::kStage;
    }
    now = 0;
  }

  // The current stage can be read, and the one before is filled anew.
  VS_DEVICE void wait(const RingParams& params) {
    wait_copies<kStages - 2>();
    __syncwarp();
    refill(params);
  }

  VS_DEVICE bool is_missing() const { return !kAligned && (missing >> (now >> 10) & 1); }

  // This lane's tile. Its halves may come in either order: their sums are added, and a + b = b + a. Lanes take them in
  // different orders so that eight lanes' vectors lie in different banks.
  VS_DEVICE void read(uint32_t shift, uint32_t (&w)[kWords<T>]) const {
    if constexpr (kAligned) {
      const uint4 a = load_shared16(first + now), b = load_shared16(second + now);
      w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
      w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    } else {
      Raw<T, false> raw;
#pragma unroll
      for (int i = 0; i < Raw<T, false>::kVectors; ++i) raw.set(i, load_shared16(first + now + 16 * i));
      raw.tile(shift, w);
    }
  }

  VS_DEVICE void advance() {
    before = now;
    now = next(now);
  }
};

template <typename T, bool kScaled, bool kAligned, int kLookups, int kWarps, int kStages>
__global__ void __launch_bounds__(32 * kWarps, 1) ring_kernel(const __grid_constant__ RingParams params) {
  static_assert(T::kBytes == 2, "the table is one of 16-bit patterns");
  using Layout = RingLayout<T, kAligned, kWarps, kStages>;
  extern __shared__ __align__(128) uint32_t table[];
  __shared__ Target targets[kWarps];
  const ForwardParams& forward = params.forward;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, index = blockIdx.x * kWarps + warp;
  const float scale = kScaled ? forward.rows.scalar_inv_temperature : 1.0f;

  Ring<T, kAligned, kWarps, kStages> ring;
  ring.start(params, shared_address(table), index);
  Table<T>::fill(table, scale);  // while the first copies are on their way
  __syncthreads();
  uint32_t table_base = shared_address(table);
  asm volatile("" : "+r"(table_base));  // kept, not made anew in the loop

  Place place;
  if (!place.start(forward, index)) return;
  do {
    if (lane == 0) targets[warp] = load_target<T, kScaled>(forward, place.m);
    Share<T, false, kLookups> share;
    share.clear();
    uint32_t shift = 0;
    if constexpr (!kAligned)
      shift = static_cast<uint32_t>(
                  reinterpret_cast<uintptr_t>(row_address(forward, source_row(forward, place.m), T::kBytes))) &
              15u;
    for (uint32_t step = place.begin; step != place.end; ++step) {
      uint32_t w[kWords<T>];
      ring.wait(params);
      if (step < params.full_steps && !ring.is_missing()) {
        ring.read(shift, w);
      } else {
        const uint32_t tiles = step < params.full_steps ? 32u : params.tail_tiles;
        if (lane < tiles && !ring.is_missing()) {
          ring.read(shift, w);
        } else {
          const int count = lane < tiles ? kTile : lane == tiles ? params.tail_columns : 0;
          const char* row = row_address(forward, source_row(forward, place.m), T::kBytes);
          load_some<T>(row + (static_cast<int64_t>(step) * 32 + lane) * (kTile * T::kBytes), count, w);
        }
      }
      ring.advance();

      share.see(w);
      const uint32_t rises = share.rises();
      share.clamp(w);
      float y[kTile];
      uint32_t place_of[kTile];
      unpack<T, kTile - kLookups>(w, y);
      table_places<T, kLookups>(w, table_base, place_of);
#pragma unroll
      for (int i = 0; kScaled && i < kTile - kLookups; ++i) y[i] = mul(y[i], scale);
      if (rises == 0) {
        share.add_looked_up(y, place_of);
      } else {
        unpack<T>(w, y);
#pragma unroll
        for (int i = 0; kScaled && i < kTile; ++i) y[i] = mul(y[i], scale);
        if (share.prepare(y, scale)) share.add(y);
      }
    }
    Partial p = share.partial(scale);
    merge_over_warp<false>(p);
    if (place.begin == 0 && place.end == forward.steps) {
      if (lane == 0) finish_row<false, kScaled>(forward, place.m, p, targets[warp]);
    } else {
      share_row<false, kScaled>(forward, index, place.m, p, targets[warp]);
    }
    __syncwarp();
  } while (place.next(forward.steps));
}

}  // namespace vocabshard::logits
