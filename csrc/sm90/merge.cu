#include "contract.h"
#include "sm90/lanes.h"
#include "sm90/merge.h"

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

// kRowThreads threads look through the partials of one row: 16 a cluster (2 CTAs, 2 consumers, 4 lanes of a quad).
template <bool kEntropy, int kRowThreads>
__global__ void __launch_bounds__(kThreads)
    merge_lanes(const char* lanes, const Schedule schedule, int m_blocks, int64_t place_bytes, const RowWork work,
                const float* target_y, int64_t* records, int64_t record_stride) {
  __shared__ Partial of_warp[kThreads / 32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  const int32_t m = static_cast<int32_t>(row / (64 * m_blocks));
  const int in_block = static_cast<int>(row % (64 * m_blocks)), in_16 = in_block % 16;
  const int row_group = 2 * (in_block / 64) + in_16 / 8, warp = in_block % 64 / 16;
  const int64_t parts = kLaneParts<kEntropy> * kLanePartBytes;
  const int64_t inside = (warp * 2 * m_blocks + row_group) * parts + in_16 % 8 * 4 * 16;

  Partial p = partial_identity();
  if (row < work.rows) {
    // clusters that may have this block of rows
    const int64_t per = schedule.clusters;
    const int32_t first = schedule.m_tiles == 1 ? 0 : max(static_cast<int32_t>(m * per / schedule.m_tiles) - 1, 0);
    const int32_t last = schedule.m_tiles == 1
                             ? schedule.clusters - 1
                             : min(static_cast<int32_t>((m + 1) * per / schedule.m_tiles) + 1, schedule.clusters - 1);
    for (int32_t i = threadIdx.x % kRowThreads; i < 16 * (last - first + 1); i += kRowThreads) {
      const int32_t cluster = first + i / 16, home = m_first(schedule, cluster);
      if (m < home || m > m_last(schedule, cluster)) continue;
      const int64_t place = (static_cast<int64_t>(cluster) * 4 + i % 16 / 4) * most_m(schedule) + (m - home);
      partial_merge(p, lane_partial<kEntropy>(lanes + place * place_bytes + inside + i % 4 * 16));
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
  const int64_t target = work.target_ids[row] - work.vocab_start;
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

template <bool kEntropy>
void launch_lanes(const WgmmaParams& p, int m_blocks, int64_t* records, int64_t record_stride, cudaStream_t stream) {
  const int64_t place = lanes_place_bytes(m_blocks, kEntropy), rows = p.work.rows;
  if (p.schedule.m_tiles <= 4)  // many clusters a row
    merge_lanes<kEntropy, kThreads><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        p.lanes, p.schedule, m_blocks, place, p.work, p.target_y, records, record_stride);
  else
    merge_lanes<kEntropy, 32><<<static_cast<unsigned>((rows + 7) / 8), kThreads, 0, stream>>>(
        p.lanes, p.schedule, m_blocks, place, p.work, p.target_y, records, record_stride);
}

}  // namespace

void launch_merge_lanes(const WgmmaParams& p, int m_blocks, bool entropy, int64_t* records, int64_t record_stride,
                        cudaStream_t stream) {
  if (entropy)
    launch_lanes<true>(p, m_blocks, records, record_stride, stream);
  else
    launch_lanes<false>(p, m_blocks, records, record_stride, stream);
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
