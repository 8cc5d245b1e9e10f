// The partials of a row, which the CTAs of a forward had of its columns, together.
#pragma once

#include "contract.h"
#include "sm90/merge.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

// Every kLanes lanes hold partials of one row, and get them merged: first the maximum, then sums of what is left.
template <bool kEntropy, int kLanes>
VS_DEVICE void merge_lanes(Partial& p) {
  float y_max = p.y_max;
  for (int by = kLanes / 2; by > 0; by /= 2) y_max = max_nan(y_max, __shfl_xor_sync(~0u, y_max, by));
  partial_raise(p, y_max);
  for (int by = kLanes / 2; by > 0; by /= 2)
    for (int i = 0; i < kLimbs; ++i) {
      p.c[i] += __shfl_xor_sync(~0u, p.c[i], by);
      if (kEntropy) p.u[i] += __shfl_xor_sync(~0u, p.u[i], by);
    }
}

// The partials of one row: those of the CTAs that had its block of rows.
struct RowPartials {
  const Schedule& schedule;
  int32_t block, unit, ctas, first, count;  // of all CTAs that had it

  VS_DEVICE RowPartials(const Schedule& s, int32_t block_of_rows) : schedule(s), block(block_of_rows) {
    unit = s.share_columns ? block / 2 : block;
    ctas = s.share_columns ? 1 : 2;
    first = first_cluster(s, unit);
    count = ctas * (last_cluster(s, unit) - first + 1);
  }

  // Which block of records, or -1.
  VS_DEVICE int64_t place(int32_t i) const {
    if (i >= count) return -1;
    const int32_t cluster = first + i / ctas, rank = schedule.share_columns ? block % 2 : i % 2;
    return (2ll * cluster + rank) * places(schedule) + (unit - first_unit(schedule, cluster));
  }
};

// What merge.cu makes of them, finished and without a target, for every thread of a CTA. of_warp: one for each warp.
template <int kThreads>
VS_DEVICE Partial merge_row(const UnmergedRows& from, int64_t row, Partial* of_warp) {
  constexpr int kWarps = kThreads / 32;
  const auto block_rows = static_cast<int64_t>(from.block_rows);
  const RowPartials there(from.schedule, static_cast<int32_t>(row / block_rows));
  Partial p = partial_identity();
  for (int32_t i = threadIdx.x; i < there.count; i += kThreads) {
    const int64_t* const at = from.partials + there.place(i) * (kRecordWords * block_rows) + row % block_rows;
    partial_merge(p, record_load<false>(at, block_rows));
  }
  merge_lanes<false, 32>(p);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = p;
  __syncthreads();
  p = of_warp[threadIdx.x % kWarps];
  merge_lanes<false, kWarps>(p);
  p.y_target = quiet_nan();
  partial_finish(p);
  return p;
}

}  // namespace vocabshard::sm90
