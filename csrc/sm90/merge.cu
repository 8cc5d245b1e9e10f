#include "sm90/check.h"
#include "sm90/draw.h"
#include "sm90/fold.h"
#include "sm90/merge_row.cuh"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

namespace {

constexpr int kThreads = 256;        // of merge_splits, and where a row's partials are few
constexpr int kOneRowThreads = 128;  // where they are many

template <bool kEntropy>
VS_DEVICE void store(const Merged& out, int64_t row, Partial& p, int64_t target_id) {
  partial_finish(p);
  if (out.records != nullptr)
    record_store<kEntropy>(out.records + row, out.record_stride, p);
  else
    fold_row<kEntropy>(out.fold, row, p, target_id);
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

__device__ int64_t made_up;  // read as a rehearsal's partials

// kRowThreads threads look through the partials of each of kRows rows.
//
// What takes time here is latency, and most of it that of this code itself, which nobody has fetched before: so it runs
// once on a made-up row while the forward still runs, and stores nothing. A block of one row fits beside a CTA of the
// forward for few rows (80 registers a thread and 128 threads are what that leaves free), so that it is there in time.
template <bool kEntropy, bool kDraw, int kRowThreads, int kRows>
__global__ void __launch_bounds__(kRowThreads* kRows, 6 * kOneRowThreads / (kRowThreads * kRows))
    merge_clusters(const int64_t* partials, const Schedule schedule, int block_rows, const RowWork work,
                   const float* target_y, const int64_t* winners, const Merged out) {
  constexpr int kWords = kEntropy ? kRecordWordsEntropy : kRecordWords, kAtOnce = 2;
  constexpr int kRowWarps = kRowThreads / 32, kWarps = kRows * kRowWarps;
  __shared__ Partial of_warp[2][kWarps];
  __shared__ Winner first_of_warp[2][kWarps];
  ptx::grid_launch_next();
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows, row = first_row + threadIdx.x / kRowThreads;
  const RowPartials there(schedule, static_cast<int32_t>(min(row, static_cast<int64_t>(work.rows) - 1) / block_rows));
  const int64_t* at_row = partials + row % block_rows;
  int64_t place[kAtOnce];
  for (int j = 0; j < kAtOnce; ++j) place[j] = there.place(threadIdx.x % kRowThreads + j * kRowThreads);
  // one of warp 0's first lanes finishes a row
  const int64_t mine = first_row + threadIdx.x / kRowWarps;
  const bool finishes = threadIdx.x < kWarps && threadIdx.x % kRowWarps == 0 && mine < work.rows;
  const int64_t target_id = !kDraw && finishes ? work.target_ids[mine] : -1, target = target_id - work.vocab_start;
  const bool target_here = !kDraw && finishes && target >= 0 && target < work.valid;

#pragma unroll 1
  for (int pass = kDraw || out.records != nullptr; pass < 2; ++pass) {
    const bool real = pass != 0;
    const int64_t* from = real ? at_row : &made_up;
    const int64_t stride = real ? block_rows : 0;
    Partial p = partial_identity();
    Winner first_here = nobody();
    if (real) ptx::grid_wait();
    float y_target = real && target_here ? target_y[mine] : quiet_nan();
#pragma unroll 1
    for (int32_t i = threadIdx.x % kRowThreads;;) {
      Partial read[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        read[j] = record_load<kEntropy>(from + max(place[j], int64_t{0}) * kWords * stride, stride);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (place[j] >= 0) partial_merge(p, read[j]);
      if constexpr (kDraw) {
        for (int j = 0; j < kAtOnce; ++j)
          if (real && place[j] >= 0)
            first_here = earlier(first_here, winner_load(winners + place[j] * (kWinnerWords * 64) + row, 64));
      }
      i += kAtOnce * kRowThreads;
      if (!real || i >= there.count) break;
      for (int j = 0; j < kAtOnce; ++j) place[j] = there.place(i + j * kRowThreads);
    }
    if (!real) {
      p = {0.0f, 0.0f, {1, 0, 0}, {0, 0, 0}};
      y_target = 0.0f;
    }
    merge_lanes<kEntropy, 32>(p);
    if constexpr (kDraw)
      for (int by = 16; by > 0; by /= 2) first_here = earlier_by_shuffle(first_here, by);
    if (threadIdx.x % 32 == 0) {
      of_warp[pass][threadIdx.x / 32] = p;
      if constexpr (kDraw) first_of_warp[pass][threadIdx.x / 32] = first_here;
    }
    __syncthreads();
    if (threadIdx.x >= 32) continue;
    p = of_warp[pass][threadIdx.x % kWarps];
    merge_lanes<kEntropy, kRowWarps>(p);
    p.y_target = y_target;
    if constexpr (kDraw) {
      first_here = first_of_warp[pass][threadIdx.x % kWarps];
      for (int by = kRowWarps / 2; by > 0; by /= 2) first_here = earlier_by_shuffle(first_here, by);
      if (finishes && real) store_drawn(out, mine, p, first_here, work.vocab_start);
    } else if (finishes) {
      store<kEntropy>(real ? out : Merged{}, mine, p, target_id);
    }
  }
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
  store<kEntropy>(out, row, p, out.target_ids[row]);
}

template <bool kEntropy, int kRowThreads, int kRows, bool kDraw = false>
void launch_clusters(const WgmmaParams& p, int m_blocks, const Merged& out, cudaStream_t stream) {
  const auto kernel = merge_clusters<kEntropy, kDraw, kRowThreads, kRows>;
  static OncePerDevice once;
  once([&] {  // as the forward has it: an SM that is to be set otherwise must run empty first
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
          "shared memory");
  });
  launch_behind(kernel, (p.work.rows + kRows - 1) / kRows, kRowThreads * kRows, stream, p.partials, p.schedule,
                64 * m_blocks, p.work, p.target_y, p.draw.winners, out);
}

}  // namespace

void launch_merge_clusters(const WgmmaParams& p, int m_blocks, bool entropy, const Merged& out, cudaStream_t stream) {
  const bool many = p.schedule.units == 1;  // clusters a row
  if (entropy)
    many ? launch_clusters<true, kOneRowThreads, 1>(p, m_blocks, out, stream)
         : launch_clusters<true, 32, kThreads / 32>(p, m_blocks, out, stream);
  else
    many ? launch_clusters<false, kOneRowThreads, 1>(p, m_blocks, out, stream)
         : launch_clusters<false, 32, kThreads / 32>(p, m_blocks, out, stream);
}

void launch_merge_drawn(const WgmmaParams& p, const Merged& out, cudaStream_t stream) {
  launch_clusters<false, kOneRowThreads, 1, true>(p, 1, out, stream);
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
