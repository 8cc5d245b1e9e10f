// The gradient of the logits from what the forward kept of them: one pass at the speed of memory, in place if wanted.
//
// A thread has 8 columns and goes down some rows of them: its loads are 16 bytes, a CTA's of a row 4 KiB.
#include <stdexcept>

#include "sm90/check.h"
#include "sm90/kept_turn.cuh"
#include "sm90/launch.h"

namespace vocabshard::sm90 {

namespace {

constexpr int kKeptThreads = 256, kWidth = 8;                  // columns of a thread
constexpr int kKeptRows = 32, kSummedRows = 128, kAtOnce = 4;  // rows of a CTA; rows whose loads are under way

VS_DEVICE uint32_t code_of(const uint4& x, int i) {
  const uint32_t pair = i / 2 == 0 ? x.x : i / 2 == 1 ? x.y : i / 2 == 2 ? x.z : x.w;
  return i % 2 == 0 ? pair & 0xffffu : pair >> 16;
}

// 8 columns of a row from `column` on.
template <bool kPlain>
VS_DEVICE void row_dlogits(float (&d)[kWidth], const uint4& codes, const DlogitsKeptCall& p, int64_t n,
                           int64_t column) {
  const DlogitsRow* at = p.row_terms + n;
  DlogitsRow row = load_row(at);
  const float reference = __ldg(p.references + column / kGroupColumns * p.references_group + n);
  const float base = add(add(reference, row.minus_int), -row.frac);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) d[j] = kept_dlogit<kPlain>(kept_log2_p(code_of(codes, j), base), row);
  const int64_t target = row.target < 0 ? -1 : row.target - p.first_column - column;
  if (target >= 0 && target < kWidth) {
    row.scale = 1.0f;
    const float of_target =
        dlogit_target<kPlain ? kPlainDlogits : kScaledDlogits>(p.target_y[n], row, at->target_grad, 0.0f);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) d[j] = target == j ? of_target : d[j];
  }
  if (row.keep == 0) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) d[j] = 0.0f;
  }
}

template <bool kPlain, bool kSums>
__global__ void __launch_bounds__(kKeptThreads) dlogits_kept(const DlogitsKeptCall p, int64_t groups) {
  constexpr int kRows = kSums ? kSummedRows : kKeptRows;
  const int64_t strips = (groups * kGroupColumns + kKeptThreads * kWidth - 1) / (kKeptThreads * kWidth);
  const int64_t block = blockIdx.x / strips, column = (blockIdx.x % strips * kKeptThreads + threadIdx.x) * kWidth;
  if (column >= groups * kGroupColumns) return;
  const int64_t end = min((block + 1) * kRows, p.rows);
  float sums[kSums ? kWidth : 1] = {};
#pragma unroll 1
  for (int64_t first = block * kRows; first < end; first += kAtOnce) {
    uint4 codes[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < end) codes[i] = *reinterpret_cast<const uint4*>(p.codes + (first + i) * p.codes_row + column);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= end) break;
      float d[kWidth];
      row_dlogits<kPlain>(d, codes[i], p, first + i, column);
      if constexpr (kSums) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[j] = add(sums[j], d[j]);
      }
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + (first + i) * p.out_row + column) =
          make_uint4(pack<__nv_bfloat16>(d[0], d[1]), pack<__nv_bfloat16>(d[2], d[3]), pack<__nv_bfloat16>(d[4], d[5]),
                     pack<__nv_bfloat16>(d[6], d[7]));
    }
  }
  if constexpr (kSums) {
    float4* to = reinterpret_cast<float4*>(p.bias_sums + block * p.sums_row + column);
    to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    to[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
  }
}

template <bool kPlain, bool kSums>
void launch_one(const DlogitsKeptCall& call, cudaStream_t stream) {
  constexpr int64_t kRows = kSums ? kSummedRows : kKeptRows;
  const int64_t groups = (call.columns + kGroupColumns - 1) / kGroupColumns;
  const int64_t strips = (groups * kGroupColumns + kKeptThreads * kWidth - 1) / (kKeptThreads * kWidth);
  const int64_t blocks = (call.rows + kRows - 1) / kRows * strips;
  if (blocks >= (int64_t{1} << 31)) throw std::invalid_argument("too many kept logits for one launch");
  dlogits_kept<kPlain, kSums><<<static_cast<unsigned>(blocks), kKeptThreads, 0, stream>>>(call, groups);
}

}  // namespace

void launch_dlogits_kept(const DlogitsKeptCall& call, cudaStream_t stream) {
  const auto require = [](bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
  };
  const int64_t width = (call.columns + kGroupColumns - 1) / kGroupColumns * kGroupColumns;
  const auto holds_groups = [&](const void* base, int64_t row) {
    return row % 8 == 0 && row >= width && reinterpret_cast<uintptr_t>(base) % 16 == 0;
  };
  require(holds_groups(call.codes, call.codes_row) && holds_groups(call.out, call.out_row),
          "codes and out must begin on 16 bytes and hold whole groups of 64 columns, rows at multiples of 8 elements");
  require(call.bias_sums == nullptr || (call.sums_row % 4 == 0 && call.sums_row >= width),
          "the sums must hold whole groups of 64 columns, rows on 16 bytes");
  if (call.rows == 0 || call.columns == 0) return;
  if (call.bias_sums != nullptr)
    call.plain ? launch_one<true, true>(call, stream) : launch_one<false, true>(call, stream);
  else
    call.plain ? launch_one<true, false>(call, stream) : launch_one<false, false>(call, stream);
  check_launch("dlogits of kept logits");
}

}  // namespace vocabshard::sm90
