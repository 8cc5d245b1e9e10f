#include "contract.h"
#include "sm90/check.h"
#include "sm90/draw.h"
#include "sm90/fold.h"
#include "sm90/merge.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

namespace {

constexpr int kThreads = 256;

// All lanes of a warp hold partials of one row, and get them merged: first the maximum, then sums of what is left.
template <bool kEntropy>
VS_DEVICE void merge_warp(Partial& p) {
  float y_max = p.y_max;
  for (int by = 16; by > 0; by /= 2) y_max = max_nan(y_max, __shfl_xor_sync(~0u, y_max, by));
  partial_raise(p, y_max);
  for (int by = 16; by > 0; by /= 2)
    for (int i = 0; i < kLimbs; ++i) {
      p.c[i] += __shfl_xor_sync(~0u, p.c[i], by);
      if (kEntropy) p.u[i] += __shfl_xor_sync(~0u, p.u[i], by);
    }
}

template <bool kEntropy>
VS_DEVICE void store(const Merged& out, int64_t row, Partial& p) {
  partial_finish(p);
  if (out.records != nullptr)
    record_store<kEntropy>(out.records + row, out.record_stride, p);
  else
    fold_row<kEntropy>(out.fold, row, p, out.target_ids[row]);
}

// A row and what it drew, of all columns of this rank.
VS_DEVICE void store_drawn(const Merged& out, int64_t row, Partial& p, Winner w, int64_t vocab_start) {
  if (w.arrival != kNoArrival) w.at += vocab_start << 32;
  partial_finish(p);
  if (out.records != nullptr) {
    record_store<false>(out.records + row, out.record_stride, p);
    winner_store(out.records + kRecordWords * out.record_stride + row, out.record_stride, w);
  } else {
    fold_drawn(out.fold, out.drawn, row, p, w);
  }
}

// kRowThreads threads look through the partials of one row: those of the CTAs that had its block of rows.
template <bool kEntropy, bool kDraw, int kRowThreads>
__global__ void __launch_bounds__(kThreads)
    merge_clusters(const int64_t* partials, const Schedule schedule, int block_rows, const RowWork work,
                   const float* target_y, const int64_t* winners, const Merged out) {
  constexpr int kWords = kEntropy ? kRecordWordsEntropy : kRecordWords;
  constexpr int kRows = kThreads / kRowThreads, kRowWarps = kRowThreads / 32;
  __shared__ Partial of_warp[kThreads / 32];
  __shared__ Winner first_of_warp[kThreads / 32];
  ptx::grid_launch_next();
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows, row = first_row + threadIdx.x / kRowThreads;
  const int32_t block = static_cast<int32_t>(row / block_rows);
  const int32_t unit = schedule.share_columns ? block / 2 : block, ctas = schedule.share_columns ? 1 : 2;

  Partial p = partial_identity();
  Winner first_here = nobody();
  ptx::grid_wait();
  if (row < work.rows) {
    // clusters that may have this unit
    const int64_t per = schedule.clusters;
    const int32_t first = schedule.units == 1 ? 0 : max(static_cast<int32_t>(unit * per / schedule.units) - 1, 0);
    const int32_t last = schedule.units == 1
                             ? schedule.clusters - 1
                             : min(static_cast<int32_t>((unit + 1) * per / schedule.units) + 1, schedule.clusters - 1);
    for (int32_t i = threadIdx.x % kRowThreads; i < ctas * (last - first + 1); i += kRowThreads) {
      const int32_t cluster = first + i / ctas, rank = schedule.share_columns ? block % 2 : i % 2;
      const int32_t home = first_unit(schedule, cluster);
      if (unit < home || unit > last_unit(schedule, cluster)) continue;
      const int64_t place = (2ll * cluster + rank) * places(schedule) + (unit - home);
      partial_merge(p, record_load<kEntropy>(partials + place * kWords * block_rows + row % block_rows, block_rows));
      if constexpr (kDraw) first_here = earlier(first_here, winner_load(winners + place * kWinnerWords * 64 + row, 64));
    }
  }
  merge_warp<kEntropy>(p);
  if constexpr (kDraw)
    for (int by = 16; by > 0; by /= 2) first_here = earlier_by_shuffle(first_here, by);
  if (threadIdx.x % 32 == 0) {
    of_warp[threadIdx.x / 32] = p;
    if constexpr (kDraw) first_of_warp[threadIdx.x / 32] = first_here;
  }
  __syncthreads();
  const int64_t mine = first_row + threadIdx.x;
  if (threadIdx.x >= kRows || mine >= work.rows) return;
  p = of_warp[threadIdx.x * kRowWarps];
  for (int i = 1; i < kRowWarps; ++i) partial_merge(p, of_warp[threadIdx.x * kRowWarps + i]);
  if constexpr (kDraw) {
    first_here = first_of_warp[threadIdx.x * kRowWarps];
    for (int i = 1; i < kRowWarps; ++i) first_here = earlier(first_here, first_of_warp[threadIdx.x * kRowWarps + i]);
    return store_drawn(out, mine, p, first_here, work.vocab_start);
  }
  const int64_t target = work.target_ids[mine] - work.vocab_start;
  if (target >= 0 && target < work.valid) p.y_target = target_y[mine];
  store<kEntropy>(out, mine, p);
}

template <bool kEntropy>
__global__ void __launch_bounds__(kThreads)
    merge_splits(const int64_t* split_records, int splits, int32_t rows, const Merged out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  constexpr int kWords = kEntropy ? kRecordWordsEntropy : kRecordWords;
  Partial p = partial_identity();
  for (int i = 0; i < splits; ++i)
    partial_merge(p, record_load<kEntropy>(split_records + static_cast<int64_t>(i) * kWords * rows + row, rows));
  store<kEntropy>(out, row, p);
}

template <bool kEntropy, int kRowThreads, bool kDraw = false>
void launch_clusters(const WgmmaParams& p, int m_blocks, const Merged& out, cudaStream_t stream) {
  constexpr int kRows = kThreads / kRowThreads;
  launch_behind(merge_clusters<kEntropy, kDraw, kRowThreads>, (p.work.rows + kRows - 1) / kRows, kThreads, stream,
                p.partials, p.schedule, 64 * m_blocks, p.work, p.target_y, p.draw.winners, out);
}

}  // namespace

void launch_merge_clusters(const WgmmaParams& p, int m_blocks, bool entropy, const Merged& out, cudaStream_t stream) {
  const bool many = p.schedule.units == 1;  // clusters a row
  if (entropy)
    many ? launch_clusters<true, 128>(p, m_blocks, out, stream) : launch_clusters<true, 32>(p, m_blocks, out, stream);
  else
    many ? launch_clusters<false, 128>(p, m_blocks, out, stream) : launch_clusters<false, 32>(p, m_blocks, out, stream);
}

void launch_merge_drawn(const WgmmaParams& p, const Merged& out, cudaStream_t stream) {
  launch_clusters<false, 128, true>(p, 1, out, stream);
}

void launch_merge_splits(const int64_t* split_records, int splits, int32_t rows, bool entropy, const Merged& out,
                         cudaStream_t stream) {
  const unsigned blocks = (rows + kThreads - 1) / kThreads;
  if (entropy)
    merge_splits<true><<<blocks, kThreads, 0, stream>>>(split_records, splits, rows, out);
  else
    merge_splits<false><<<blocks, kThreads, 0, stream>>>(split_records, splits, rows, out);
}

}  // namespace vocabshard::sm90
