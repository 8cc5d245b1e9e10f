// The rows of a forward over logits: how they are dealt to workers, and how they end.
//
// A worker is a warp; a step is 32 tiles of a row, one a lane. All steps of the M rows, row after row, are dealt evenly
// to the workers, so that each has a few whole rows and at most two that it shares with its neighbours. A worker only
// notes the partial of a row that ends and settles several at a time, a lane each; partials of a shared row meet in the
// workspace, and whoever comes last finishes it: any order gives the same bytes.
#pragma once

#include "sm90/logits.h"
#include "sm90/logits_share.cuh"

namespace vocabshard::sm90::logits {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kStepColumns = 32 * kTile;
constexpr int kNotes = 8;  // rows that a worker settles at a time

struct ForwardParams {
  const char* logits;
  const char* logits_end;
  int64_t row_stride;     // bytes
  int64_t logits_rows;    // N
  const int64_t* source;  // row of logits that an output row reads; nullptr: the same
  int64_t outputs;        // M
  int32_t valid;
  uint32_t steps;    // of a row, at least 1
  uint32_t workers;  // at most outputs * steps, so that each has something
  RowInputs rows;
  int64_t vocab_start;
  int64_t* records;  // nullptr: fold
  LogitsFold fold;
  uint32_t* arrivals;  // one a worker, zero
  int64_t* shared;     // two partials a worker
};

// Where worker b begins: it takes steps [begin(b), begin(b + 1)) of all.
struct Deal {
  uint64_t total, workers;  // their product is below 2^63

  VS_DEVICE explicit Deal(const ForwardParams& p)
      : total(static_cast<uint64_t>(p.outputs) * p.steps), workers(p.workers) {}

  VS_DEVICE uint64_t begin(uint32_t b) const { return total * b / workers; }
  VS_DEVICE uint32_t owner(uint64_t step) const { return static_cast<uint32_t>(((step + 1) * workers - 1) / total); }
};

// A way through the rows of a worker.
struct Place {
  uint32_t m;     // output row
  uint32_t left;  // steps in it, this one too; 0: the way is over

  // end: the step at which it is over. Returns the first step of row m.
  VS_DEVICE uint32_t start(const ForwardParams& p, uint64_t first, uint64_t end) {
    m = static_cast<uint32_t>(first / p.steps);
    const uint32_t step = static_cast<uint32_t>(first % p.steps);
    left = static_cast<uint32_t>(min(static_cast<uint64_t>(p.steps - step), end - first));
    return step;
  }

  VS_DEVICE void next_row(const ForwardParams& p, uint64_t end) {
    ++m;
    const uint64_t first = static_cast<uint64_t>(m) * p.steps;
    left = static_cast<uint32_t>(first < end ? min(static_cast<uint64_t>(p.steps), end - first) : 0);
  }
};

// ---- partials of many threads ----

constexpr int kPartialWords = 1 + 2 * kLimbs;

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

// Partials in shared or global memory.
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

VS_DEVICE bool row_exists(const ForwardParams& p, int64_t m) {
  return p.source == nullptr || (p.source[m] >= 0 && p.source[m] < p.logits_rows);
}

// For an index out of range the first row is read, and the result does not count.
VS_DEVICE const char* row_address(const ForwardParams& p, int64_t m) {
  const int64_t n = p.source == nullptr ? m : (row_exists(p, m) ? p.source[m] : 0);
  return p.logits + n * p.row_stride;
}

template <bool kScaled>
VS_DEVICE float row_scale(const ForwardParams& p, int64_t m) {
  if constexpr (!kScaled) return 1.0f;
  return p.rows.inv_temperature ? p.rows.inv_temperature[m] : p.rows.scalar_inv_temperature;
}

// What a row needs from elsewhere when it ends.
struct RowTarget {
  int64_t id;
  float scale, y;  // NaN: the target is not here
  bool exists;
};

template <typename T, bool kScaled>
VS_DEVICE RowTarget row_target(const ForwardParams& params, uint32_t m) {
  RowTarget t = {params.rows.target_ids[m], row_scale<kScaled>(params, m), quiet_nan(), row_exists(params, m)};
  const int64_t local = t.id - params.vocab_start;
  if (local >= 0 && local < params.valid && t.exists)
    t.y = mul(load_element<T>(row_address(params, m) + local * T::kBytes), t.scale);
  return t;
}

// By one lane.
template <bool kEntropy>
VS_DEVICE void finish_row(const ForwardParams& params, uint32_t m, Partial p, const RowTarget& t) {
  if (params.valid > 0 && (is_nan(t.scale) || !t.exists)) p.y_max = quiet_nan();  // of a bad scale every y is NaN
  p.y_target = t.y;
  partial_finish(p);
  if (params.records) {
    record_store<kEntropy>(params.records + m, params.outputs, p);
    return;
  }
  const LogitsFold& fold = params.fold;
  const int target = t.id == fold.ignore_index                  ? kTargetIgnored
                     : t.id >= 0 && t.id < fold.real_vocab_size ? kTargetScored
                                                                : kTargetInvalid;
  const Folded f = fold_finish<kEntropy>(p, target, fold.invalid_is_nan);
  fold.out.lse[m] = f.lse;
  if constexpr (kEntropy) fold.out.entropy[m] = f.entropy;
  fold.out.lse2_int[m] = f.lse2_int;
  fold.out.lse2_frac[m] = f.lse2_frac;
  fold.out.maximum[m] = p.y_max;
  asm volatile("" ::: "memory");  // last: what nobody wants is written to logp's memory, too
  fold.out.logp[m] = f.logp;
}

// Rows m ... m + count - 1, whose partials (this worker's) are in notes. By a whole warp.
template <typename T, bool kEntropy, bool kScaled>
__device__ __noinline__ void settle(const ForwardParams& params, uint32_t worker, uint32_t first_m, int count,
                                    const volatile int64_t (*notes)[kPartialWords]) {
  const Deal deal(params);
  const int lane = threadIdx.x & 31;
  const uint32_t m = first_m + min(lane, count - 1);
  const uint64_t row_begin = static_cast<uint64_t>(m) * params.steps;
  const uint32_t first = deal.owner(row_begin), last = deal.owner(row_begin + params.steps - 1);
  __syncwarp();
  Partial p = get_partial<kEntropy>(notes[m - first_m]);
  bool complete = lane < count && first == last, last_to_come = false;
  if (lane < count && first != last) {
    // a worker's slots: 0 the row it begins in, 1 the row it ends in
    const bool begins_here = deal.begin(worker) <= row_begin;
    put_partial<kEntropy>(params.shared + (2 * static_cast<int64_t>(worker) + begins_here) * kPartialWords, p);
    __threadfence();
    last_to_come = atomicAdd(params.arrivals + first, 1u) == last - first;
    __threadfence();
  }
  for (unsigned pending = __ballot_sync(kAllLanes, last_to_come); pending != 0; pending &= pending - 1) {
    const int source = __ffs(pending) - 1;
    const uint32_t from = __shfl_sync(kAllLanes, first, source), to = __shfl_sync(kAllLanes, last, source);
    const uint64_t begin = static_cast<uint64_t>(first_m + source) * params.steps;
    __syncwarp();
    Partial all = partial_identity();
    for (uint32_t b = from + lane; b <= to; b += 32) {
      const bool begins_there = deal.begin(b) <= begin;
      partial_merge(
          all, get_partial<kEntropy>(params.shared + (2 * static_cast<int64_t>(b) + begins_there) * kPartialWords));
    }
    merge_over_warp<kEntropy>(all);
    if (lane == source) {
      params.arrivals[from] = 0;  // as it was found
      p = all;
      complete = true;
    }
  }
  if (complete) finish_row<kEntropy>(params, m, p, row_target<T, kScaled>(params, m));
  __syncwarp();
}

}  // namespace vocabshard::sm90::logits
