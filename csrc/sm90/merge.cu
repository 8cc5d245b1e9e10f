#include "contract.h"
#include "sm90/check.h"
#include "sm90/merge.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

namespace {

constexpr int kThreads = 256;

VS_DEVICE int64_t shuffle_down(int64_t x, int by) { return __shfl_down_sync(~0u, x, by); }

template <bool kEntropy>
VS_DEVICE void merge_warp(Partial& p) {
  for (int by = 16; by > 0; by /= 2) {
    Partial other = partial_identity();
    other.y_max = __shfl_down_sync(~0u, p.y_max, by);
    for (int i = 0; i < kLimbs; ++i) {
      other.c[i] = shuffle_down(p.c[i], by);
      if (kEntropy) other.u[i] = shuffle_down(p.u[i], by);
    }
    partial_merge(p, other);
  }
}

// kRowThreads threads look through the partials of one row: those of the CTAs that had its block of rows.
template <bool kEntropy, int kRowThreads>
__global__ void __launch_bounds__(kThreads)
    merge_clusters(const int64_t* partials, const Schedule schedule, int block_rows, const RowWork work,
                   const float* target_y, int64_t* records, int64_t record_stride) {
  __shared__ Partial of_warp[kThreads / 32];
  ptx::grid_launch_next();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  const int32_t block = static_cast<int32_t>(row / block_rows);
  const int32_t unit = schedule.share_columns ? block / 2 : block, ctas = schedule.share_columns ? 1 : 2;
  constexpr int kWords = kEntropy ? kRecordWordsEntropy : kRecordWords;

  Partial p = partial_identity();
  int64_t target = -1;
  ptx::grid_wait();
  if (row < work.rows) {
    target = work.target_ids[row] - work.vocab_start;
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
    }
  }
  merge_warp<kEntropy>(p);
  if (kRowThreads > 32) {
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = p;
    __syncthreads();
    if (threadIdx.x % kRowThreads == 0)
      for (int i = 1; i < kRowThreads / 32; ++i) partial_merge(p, of_warp[threadIdx.x / 32 + i]);
  }
  if (threadIdx.x % kRowThreads != 0 || row >= work.rows) return;
  if (target >= 0 && target < work.valid) p.y_target = target_y[row];
  partial_finish(p);
  record_store<kEntropy>(records + row, record_stride, p);
}

template <bool kEntropy>
__global__ void __launch_bounds__(kThreads)
    merge_splits(const int64_t* split_records, int splits, int32_t rows, int64_t* records, int64_t record_stride) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  constexpr int kWords = kEntropy ? kRecordWordsEntropy : kRecordWords;
  Partial p = partial_identity();
  for (int i = 0; i < splits; ++i)
    partial_merge(p, record_load<kEntropy>(split_records + static_cast<int64_t>(i) * kWords * rows + row, rows));
  partial_finish(p);
  record_store<kEntropy>(records + row, record_stride, p);
}

template <bool kEntropy, int kRowThreads>
void launch_clusters(const WgmmaParams& p, int m_blocks, int64_t* records, int64_t record_stride, cudaStream_t stream) {
  constexpr int kRows = kThreads / kRowThreads;
  launch_behind(merge_clusters<kEntropy, kRowThreads>, (p.work.rows + kRows - 1) / kRows, kThreads, stream, p.partials,
                p.schedule, 64 * m_blocks, p.work, p.target_y, records, record_stride);
}

}  // namespace

void launch_merge_clusters(const WgmmaParams& p, int m_blocks, bool entropy, int64_t* records, int64_t record_stride,
                           cudaStream_t stream) {
  const bool many = p.schedule.units == 1;  // clusters a row
  if (entropy)
    many ? launch_clusters<true, 128>(p, m_blocks, records, record_stride, stream)
         : launch_clusters<true, 32>(p, m_blocks, records, record_stride, stream);
  else
    many ? launch_clusters<false, 128>(p, m_blocks, records, record_stride, stream)
         : launch_clusters<false, 32>(p, m_blocks, records, record_stride, stream);
}

void launch_merge_splits(const int64_t* split_records, int splits, int32_t rows, bool entropy, int64_t* records,
                         int64_t record_stride, cudaStream_t stream) {
  const unsigned blocks = (rows + kThreads - 1) / kThreads;
  if (entropy)
    merge_splits<true><<<blocks, kThreads, 0, stream>>>(split_records, splits, rows, records, record_stride);
  else
    merge_splits<false><<<blocks, kThreads, 0, stream>>>(split_records, splits, rows, records, record_stride);
}

}  // namespace vocabshard::sm90
