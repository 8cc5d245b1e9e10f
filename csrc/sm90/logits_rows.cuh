// What the forward kernels share: their parameters, partials of many threads, and the end of a row.
//
// The M rows are cut into steps of so many columns; all steps, row after row, are dealt evenly to workers, so a worker
// has a few whole rows and at most two that it shares with its neighbours. Partial sums of shared rows meet in the
// workspace, and whichever worker comes last finishes the row: any order gives the same bytes.
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
  uint32_t steps;    // of a row, at least 1
  uint32_t workers;  // at most outputs * steps, so that each has something
  RowInputs rows;
  int64_t vocab_start;
  int64_t* records;  // nullptr: fold
  LogitsFold fold;
  uint32_t* arrivals;  // one a worker, zero
  int64_t* shared;     // two partials a worker
};

constexpr int kPartialWords = 1 + 2 * kLimbs;

// ---- loads ----

VS_DEVICE uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Words of a tile, one element after the other, -inf from `count` on.
template <typename T>
VS_DEVICE void load_some(const char* p, int count, uint32_t* w) {
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

// An index out of range is brought into it; finish_row gives such a row NaN.
VS_DEVICE int64_t source_row(const ForwardParams& params, int64_t m) {
  if (params.source == nullptr) return m;
  return max(static_cast<int64_t>(0), min(params.source[m], params.logits_rows - 1));
}

VS_DEVICE const char* row_address(const ForwardParams& params, int64_t n, int bytes_of_element) {
  return static_cast<const char*>(params.logits) + n * params.row_stride * bytes_of_element;
}

template <bool kScaled>
VS_DEVICE float row_scale(const ForwardParams& params, int64_t m) {
  if constexpr (!kScaled) return 1.0f;
  return params.rows.inv_temperature ? params.rows.inv_temperature[m] : params.rows.scalar_inv_temperature;
}

struct Target {
  int64_t id;
  float y;  // NaN where it is not in this shard
};

// By the lane that will finish the row, when it begins: the second load waits for the first.
template <typename T, bool kScaled>
VS_DEVICE Target load_target(const ForwardParams& params, uint32_t m) {
  Target target = {params.rows.target_ids[m], quiet_nan()};
  const int64_t local = target.id - params.vocab_start;
  if (local >= 0 && local < params.valid) {
    const char* row = row_address(params, source_row(params, m), T::kBytes);
    target.y = mul(load_one<T>(row + local * T::kBytes), row_scale<kScaled>(params, m));
  }
  return target;
}

// By one lane.
template <bool kEntropy, bool kScaled>
__device__ __noinline__ void finish_row(const ForwardParams& params, uint32_t m, Partial p, Target target) {
  if (kScaled && params.valid > 0) {
    const float scale = row_scale<kScaled>(params, m);
    if (is_nan(scale)) p.y_max = scale;  // every y is NaN
  }
  if (params.source != nullptr && (params.source[m] < 0 || params.source[m] >= params.logits_rows))
    p.y_max = quiet_nan();
  p.y_target = target.y;
  partial_finish(p);
  if (params.records) {
    record_store<kEntropy>(params.records + m, params.outputs, p);
    return;
  }
  const LogitsFold& fold = params.fold;
  const int status = target.id == fold.ignore_index                       ? kTargetIgnored
                     : target.id >= 0 && target.id < fold.real_vocab_size ? kTargetScored
                                                                          : kTargetInvalid;
  const Folded f = fold_finish<kEntropy>(p, status, fold.invalid_is_nan);
  fold.out.logp[m] = f.logp;
  fold.out.lse[m] = f.lse;
  if constexpr (kEntropy) fold.out.entropy[m] = f.entropy;
  fold.out.lse2_int[m] = f.lse2_int;
  fold.out.lse2_frac[m] = f.lse2_frac;
  fold.out.maximum[m] = p.y_max;
}

// Where the workers' shares begin: worker b takes steps [begin(b), begin(b + 1)) of all.
struct Deal {
  uint64_t total;
  uint32_t workers;

  VS_DEVICE uint64_t begin(uint32_t b) const { return total / workers * b + total % workers * b / workers; }

  VS_DEVICE uint32_t owner(uint64_t step) const {
    uint32_t b = static_cast<uint32_t>(static_cast<double>(step) * workers / static_cast<double>(total));
    b = min(b, workers - 1);
    while (begin(b) > step) --b;
    while (begin(b + 1) <= step) ++b;
    return b;
  }
};

VS_DEVICE Deal deal_of(const ForwardParams& params) {
  return {static_cast<uint64_t>(params.outputs) * params.steps, params.workers};
}

VS_DEVICE uint32_t count_arrival(uint32_t* arrivals) {  // what was written before is seen by who comes later
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
  return before;
}

// A row that several workers share: by one warp of each. The last one finishes it.
template <bool kEntropy, bool kScaled>
__device__ __noinline__ void share_row(const ForwardParams& params, uint32_t index, uint32_t m, Partial p,
                                       Target target) {
  const Deal deal = deal_of(params);
  const uint64_t row_begin = static_cast<uint64_t>(m) * params.steps;
  const uint32_t first = deal.owner(row_begin), last = deal.owner(row_begin + params.steps - 1);
  const int lane = threadIdx.x & 31;
  uint32_t before = 0;
  if (lane == 0) {
    // a worker's slots: 0 the row it begins in, 1 the row it ends in; either may be missing
    const bool begins_here = deal.begin(index) <= row_begin;
    put_partial<kEntropy>(params.shared + (2 * static_cast<int64_t>(index) + begins_here) * kPartialWords, p);
    before = count_arrival(params.arrivals + first);
  }
  before = __shfl_sync(kAllLanes, before, 0);
  if (before != last - first) return;
  p = partial_identity();
  for (uint32_t b = first + lane; b <= last; b += 32) {
    const bool begins_there = deal.begin(b) <= row_begin;
    partial_merge(p,
                  get_partial<kEntropy>(params.shared + (2 * static_cast<int64_t>(b) + begins_there) * kPartialWords));
  }
  merge_over_warp<kEntropy>(p);
  if (lane == 0) {
    params.arrivals[first] = 0;  // as it was found
    finish_row<kEntropy, kScaled>(params, m, p, target);
  }
}

// A worker's way through its rows.
struct Place {
  uint32_t m;      // output row
  uint32_t begin;  // first step of this worker in it
  uint32_t end;
  uint32_t left;  // steps in later rows

  // False: there is nothing for this worker.
  VS_DEVICE bool start(const ForwardParams& params, uint32_t index) {
    const Deal deal = deal_of(params);
    left = 0;
    if (index >= deal.workers) return false;
    const uint64_t first = deal.begin(index);
    left = static_cast<uint32_t>(deal.begin(index + 1) - first);
    m = static_cast<uint32_t>(first / params.steps);
    begin = static_cast<uint32_t>(first % params.steps);
    end = min(params.steps, begin + left);
    left -= end - begin;
    return true;
  }

  VS_DEVICE bool next(uint32_t steps) {
    if (left == 0) return false;
    ++m;
    begin = 0;
    end = min(steps, left);
    left -= end;
    return true;
  }
};

}  // namespace vocabshard::logits
