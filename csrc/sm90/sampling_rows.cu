// Whole rows in one launch: a cluster of CTAs keeps a row in shared memory, finds the cut of a sampling program, draws
// a token, sums the truncated softmax, and ranks columns.
#include <algorithm>
#include <stdexcept>

#include "sm90/check.h"
#include "sm90/launch.h"
#include "sm90/logits_share.cuh"
#include "sm90/sampling_clock.cuh"
#include "sm90/sampling_launch.h"
#include "sm90/sampling_select.cuh"

namespace vocabshard::sm90 {

namespace sampling {

namespace {

constexpr int kMostTiles = 3072;   // of a CTA: 192 KiB
constexpr int kTilesOfTwo = 1280;  // so that two CTAs fit on a multiprocessor
constexpr int kSharedBytes = (sizeof(Shared) + 127) / 128 * 128;
static_assert(kSharedBytes + 64 * kMostTiles <= 227 * 1024 &&
              2 * (kSharedBytes + 64 * kTilesOfTwo + 1024) <= 228 * 1024);

// A cut as the columns of a slice are held against it.
struct Keep {
  float logit;
  int32_t tie;  // of equals the slice's columns up to this one

  VS_DEVICE Keep(const Slice& slice, int64_t cut) : logit(cut_logit(cut)) {
    const int64_t last = cut_tie(cut) - slice.first_id;
    tie = last < -1 ? -1 : last > slice.columns ? slice.columns : static_cast<int32_t>(last);
  }
  VS_DEVICE bool any(const float4& v) const { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) >= logit; }
  VS_DEVICE bool operator()(float z, int32_t column) const { return z > logit || (z == logit && column <= tie); }
};

// The kept column whose clock goes off first; the row's best column, `top`, is one of them.
//
// Few are looked at closely. E >= log2(e) x / 2^32, so that a column comes first only where x / 2^32 is at most
// 0.6932 E' e^(y - y'), E' and y' those of the earliest so far: compared by approximation, with a quarter to spare.
VS_DEVICE Drawn draw(Slice& slice, int64_t cut, float scale, int64_t top, int64_t seed, int64_t row) {
  constexpr float kSpare = 0.33f, kShare = -0.5287f;  // log2 of 1.25 and of 0.6932
  const Keep keep(slice, cut);
  const int64_t top_id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(top));
  const float y_max = clamp_logit(mul(logit_of(static_cast<int32_t>(top >> 32)), scale)), top_log = mul(y_max, kLog2e);
  const float top_clock = clock_at(column_word(top_id, 0, seed, row), top_id, seed, row);
  Words<2> mine = {{arrival_of(top_clock, y_max), (top_id << 32) + static_cast<uint32_t>(top >> 32)}};
  float bound = __log2f(top_clock) + (kSpare + kShare);
  const bool groups_whole = (slice.first_id & 3) == 0;

  for (int32_t base = threadIdx.x / 32 * 32; base < slice.chunks; base += kThreads) {
    const int32_t i = base + static_cast<int32_t>(threadIdx.x) % 32;
    const float4 v = i < slice.chunks ? slice.z[i] : make_float4(neg_inf(), neg_inf(), neg_inf(), neg_inf());
    if (keep.any(v)) {
      const float z[4] = {v.x, v.y, v.z, v.w};
      const int64_t id = slice.first_id + 4 * i;
      Philox words = column_words(id >> 2, 0, seed, row);
      if (!groups_whole) {  // words of the columns, not of the group
        words.word[0] = word_of(words, id & 3);
        for (int j = 1; j < 4; ++j) words.word[j] = column_word(id + j, 0, seed, row);
      }
      const float offset = bound - top_log;
      bool early[4], any = false;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float limit = ptx::exp2(fmaf(clamp_logit(mul(z[j], scale)), kLog2e, offset));
        // 1 + x / 2^32, rounded down to 23 bits
        early[j] = from_bits(words.word[j] >> 9 | 0x3f800000u) <= limit + 1.0000005f;
        any |= early[j];
      }
      if (any) {
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
          const float x = j == 0 ? z[0] : j == 1 ? z[1] : j == 2 ? z[2] : z[3];
          const bool first = j == 0 ? early[0] : j == 1 ? early[1] : j == 2 ? early[2] : early[3];
          if (!first || is_neg_inf(x) || !keep(x, 4 * i + j)) continue;
          const float y = clamp_logit(mul(x, scale)), clock = clock_at(word_of(words, j), id + j, seed, row);
          const Words<2> other = {{arrival_of(clock, y), ((id + j) << 32) + static_cast<uint32_t>(order_of(x))}};
          mine = Smaller()(mine, other);
          bound = fminf(bound, __log2f(clock) - fmaf(y, kLog2e, -top_log) + (kSpare + kShare));
        }
      }
    }
    bound = logit_of(__reduce_min_sync(kAllLanes, order_of(bound)));
  }
  mine = over_cluster(slice, mine, {{kNoArrival, INT64_MAX}}, Smaller());
  return {mine.x[0], mine.x[1] >> 32, static_cast<int32_t>(static_cast<uint32_t>(mine.x[1]))};
}

// The exact sum of the kept columns' terms; a tile is that of four lanes.
VS_DEVICE Partial kept_partial(Slice& slice, int64_t cut, float scale, float y_max) {
  Partial p = partial_identity();
  p.y_max = y_max;
  if (poisons(y_max) || is_neg_inf(y_max)) return p;
  const Keep keep(slice, cut);
  const int32_t R = 32 * limb_top(exp_k(clamp_logit(y_max))) - logits::kOffset;
  const float magic = static_cast<float>(12582912 - R);
  const float lowest = mul(static_cast<float>(R + logits::kLowest), logits::kLn2f);
  logits::Counters counters;
  counters.clear();
  for (int32_t base = threadIdx.x / 32 * 32; base < slice.chunks; base += kThreads) {
    const int32_t i = base + static_cast<int32_t>(threadIdx.x) % 32;
    const float4 v = i < slice.chunks ? slice.z[i] : make_float4(neg_inf(), neg_inf(), neg_inf(), neg_inf());
    if (!__any_sync(kAllLanes, keep.any(v))) continue;
    const float z[4] = {v.x, v.y, v.z, v.w};
    float e[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float y = keep(z[j], 4 * i + j) ? mul(z[j], scale) : neg_inf();
      // where the maximum itself is about -2^20, finite logits below that count as -2^20
      if (lowest < -kLogitLimit) y = is_neg_inf(y) ? y : clamp_logit(y);
      e[j] = logits::scaled_exp(fmaxf(y, lowest), magic);
    }
    float s = add(add(e[0], e[1]), add(e[2], e[3]));
    s = add(s, __shfl_xor_sync(kAllLanes, s, 1));
    s = add(s, __shfl_xor_sync(kAllLanes, s, 2));
    if (threadIdx.x % 4 == 0) counters.add_positive(static_cast<double>(s));
  }
  Words<kLimbs> sums;
  counters.get(sums.x);
  sums = over_cluster(slice, sums, {{0, 0, 0}}, Sum());
  for (int k = 0; k < kLimbs; ++k) p.c[k] = sums.x[k];
  return p;
}

// The places of the best columns, descending.
VS_DEVICE void list_best(Slice& slice, const SamplingRows& p, int64_t n, float y_max, float scale, bool usable,
                         int64_t* list) {
  Shared& s = *slice.shared;
  const auto count = static_cast<int32_t>(min(static_cast<int64_t>(p.best_count), p.valid));
  int64_t last = INT64_MAX;
  if (count > 0) last = select(slice, {false, true, count, kKeepAll, scale, y_max, usable});
  cluster_sync();
  if (threadIdx.x == 0) s.few_count = 0;
  cluster_sync();
  uint32_t* const listed = of_rank(&s.few_count, 0);
  int64_t* const places = of_rank(list, 0);
  for (int32_t i = threadIdx.x; i < slice.columns && count > 0; i += kThreads) {
    const int64_t place = place_of(slice.column(i), slice.first_id + i);
    if (place >= last) places[atomicAdd(listed, 1u)] = place;
  }
  cluster_sync();
  if (slice.rank != 0) return;
  for (int32_t i = threadIdx.x; i < p.best_count; i += kThreads) {
    if (i >= count) {
      p.best[n * p.best_count + i] = kKeepAll;
      continue;
    }
    int32_t larger = 0;
    for (int32_t j = 0; j < count; ++j) larger += list[j] > list[i];
    p.best[n * p.best_count + larger] = list[i];
  }
}

__device__ __noinline__ int64_t find_cut(Slice& slice, const SamplingRows& p, int64_t cut, float scale, int64_t top) {
  const float z_max = logit_of(static_cast<int32_t>(top >> 32));
  for (int k = 0; k < p.steps; ++k) {
    const SamplingStep& step = p.step[k];
    const float at_scale = step.scaled ? scale : 1.0f, at_max = mul(z_max, at_scale);
    int64_t next = top;  // greedy
    if (step.kind == kTopK) {
      next = select(slice, {false, false, min(step.number, p.valid), kKeepAll, at_scale, at_max, true});
    } else if (step.kind == kTopP) {
      next = select(slice, {true, true, step.number, cut, at_scale, at_max, true});
    } else if (step.kind == kMinP) {
      const float threshold = static_cast<float>(add(static_cast<double>(at_max), step.ln));
      Words<1> lowest = {{INT32_MAX}};
      for (int32_t i = threadIdx.x; i < slice.columns; i += kThreads) {
        const float z = slice.column(i);
        if (mul(z, at_scale) >= threshold) lowest.x[0] = min(lowest.x[0], static_cast<int64_t>(order_of(z)));
      }
      next = over_cluster(slice, lowest, {{INT32_MAX}}, Smaller()).x[0] * (int64_t{1} << 32);
    }
    cut = next > cut ? next : cut;
  }
  return cut;
}

__global__ void __launch_bounds__(kThreads, 2)
    rows_kernel(const __grid_constant__ SamplingRows p, int32_t slice_tiles) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  float* const z = reinterpret_cast<float*>(memory + kSharedBytes);
  const cg::cluster_group cluster = cg::this_cluster();
  const uint32_t rank = cluster.block_rank(), ranks = cluster.num_blocks();
  const int64_t n = blockIdx.x / ranks, first = int64_t{kTile} * slice_tiles * rank;
  const int64_t columns = max(int64_t{0}, min(p.valid - first, int64_t{kTile} * slice_tiles));
  const float* const row = p.logits + n * p.row_stride;
  const bool leader = rank == 0 && threadIdx.x == 0;
  const float scale = p.scales ? p.scales[n] : p.scale;
  Slice slice = {reinterpret_cast<const float4*>(z),
                 static_cast<int32_t>((columns + kTile - 1) / kTile * (kTile / 4)),
                 static_cast<int32_t>(columns),
                 p.vocab_start + first,
                 &s,
                 rank,
                 ranks,
                 0,
                 0};
  load_slice(slice, z, row + first);
  cluster_sync();  // every CTA is there before anything is sent to it

  const int64_t top = best_place(slice);
  const bool has_nan = top == INT64_MAX;
  const float z_max = has_nan ? quiet_nan() : top == kKeepAll ? neg_inf() : logit_of(static_cast<int32_t>(top >> 32));
  const float y_max = mul(z_max, scale);
  bool usable = in_range(y_max) && !is_nan(add(z_max, -z_max));
  for (int k = 0; k < p.steps; ++k) usable &= p.step[k].scaled || in_range(z_max);
  if (p.maxima && leader) p.maxima[n] = top;

  int64_t cut = p.given_cut ? p.given_cut[n] : kKeepAll;
  if (p.steps > 0 && usable) cut = find_cut(slice, p, cut, scale, top);
  if (p.cut && leader) p.cut[n] = cut;

  Drawn drawn = {kNoArrival, -1, order_of(neg_inf())};
  if (p.draw) {
    // of a part of a row nobody knows whether the whole is usable; where the best column is left out all are
    const bool races = p.whole ? usable : !has_nan && !is_neg_inf(y_max) && !poisons(y_max);
    if (races && top >= cut) drawn = draw(slice, cut, scale, top, p.seed, p.row_keys[n]);
    if (leader) {
      p.drawn[n] = drawn.arrival;
      p.drawn[p.rows + n] = drawn.id;
      p.drawn[2 * p.rows + n] = drawn.order;
    }
  }
  if (p.records) {
    Partial partial = partial_identity();
    if (!p.records_there) partial = kept_partial(slice, cut, scale, !has_nan && top < cut ? neg_inf() : y_max);
    if (leader) {
      if (p.records_there) partial = record_load<false>(p.records + n, p.rows);
      partial.y_target = quiet_nan();
      if (p.valid > 0 && is_nan(scale)) partial.y_max = quiet_nan();
      const int64_t target = p.target_ids ? p.target_ids[n] : drawn.id, local = target - p.vocab_start;
      if (local >= 0 && local < p.valid && target >= 0) {
        const float x = row[local];
        partial.y_target = is_cut(x, target, cut_logit(cut), cut_tie(cut)) ? neg_inf() : mul(x, scale);
      }
      partial_finish(partial);
      record_store<false>(p.records + n, p.rows, partial);
    }
  }
  if (p.before) {
    const int64_t place = p.place[n];
    Words<1> larger = {{0}};
    for (int32_t i = threadIdx.x; i < slice.columns; i += kThreads)
      larger.x[0] += place_of(slice.column(i), slice.first_id + i) > place;
    larger = over_cluster(slice, larger, {{0}}, Sum());
    if (leader) p.before[n] = larger.x[0];
  }
  if (p.best_count > 0)
    list_best(slice, p, n, y_max, scale, usable,
              reinterpret_cast<int64_t*>(memory + kSharedBytes) + 32 * slice_tiles / 4);
  cluster_sync();  // a CTA's memory has to stay while others read it
}

}  // namespace

}  // namespace sampling

int64_t sampling_rows_columns() {
  return int64_t{sampling::kMostCluster} * (sampling::kMostTiles - kMostBest / 8) * kTile;
}

void launch_sampling_rows(const SamplingRows& call, cudaStream_t stream) {
  using namespace sampling;
  if (call.valid > sampling_rows_columns()) throw std::invalid_argument("sampling: more columns than a cluster keeps");
  if (call.rows == 0) return;
  const int64_t tiles = (call.valid + kTile - 1) / kTile;
  int cluster = 1;
  while (cluster < kMostCluster && cluster * int64_t{kTilesOfTwo} < tiles) cluster *= 2;
  // few rows: as many multiprocessors as there are
  while (cluster < kMostCluster && 2 * cluster * call.rows <= multiprocessor_count() && tiles > 64 * cluster)
    cluster *= 2;
  const auto slice_tiles = static_cast<int32_t>(std::max<int64_t>(1, (tiles + cluster - 1) / cluster));
  const size_t list = call.best_count > 0 ? size_t{8} * kMostBest : 0;

  static OncePerDevice allowed;
  allowed([] {
    check(
        cudaFuncSetAttribute(rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes + 64 * kMostTiles),
        "shared memory of the sampling kernel");
    check(cudaFuncSetAttribute(rows_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "cluster of the sampling kernel");
  });
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(call.rows * cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes + size_t{64} * slice_tiles + list;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, rows_kernel, call, slice_tiles), "sampling of whole rows");
}

}  // namespace vocabshard::sm90
