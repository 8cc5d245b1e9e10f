// What the grids of sampling_stream.h know of a row, and how they read it.
#pragma once

#include "sm90/fold.h"
#include "sm90/logits_share.cuh"
#include "sm90/merge_row.cuh"
#include "sm90/sampling_clock.cuh"
#include "sm90/sampling_stream.h"

namespace vocabshard::sm90::sampling {

constexpr int kListed = 8192;  // candidates of a row
constexpr int64_t kCandidateWords = 2 * kListed;
constexpr int32_t kMaximaColumns = 64;
constexpr int64_t kRowMaxima = kStreamedColumns / kMaximaColumns;

constexpr int kMostParts = 96;  // CTAs of a row

constexpr int64_t kNoiseWords = kStreamedColumns / 32;  // a bit a column

constexpr int kDepths = 4096;  // of a row's columns, beside a forward

// The columns that may be the last that is kept lie in [low, high] by y.
struct Window {
  float low, high;
};

// Of a row's columns that were counted by depth: by how many CTAs so far, from which y on down, and the best one, its y
// as a radix_key above the bits of its clock.
struct Counted {
  uint32_t collected;
  float top;
  unsigned long long best;
};

// Of one row under a top_p, from grid to grid.
struct alignas(128) Head {
  float y_max;
  Window window;               // what is above is kept if the crossing is in it
  uint32_t listed, collected;  // candidates, and CTAs that have come
  float bound;                 // of terms, for who may come first: bound_of
  bool usable;
};
static_assert(sizeof(Head) == 128);

// What some columns come to.
struct alignas(64) PartOfRow {
  int64_t arrival, who, c[kLimbs];
  int64_t total, above;  // masses of all of them, where these are summed, and of what is above the window

  VS_DEVICE Words<2> first() const { return {{arrival, who}}; }
  VS_DEVICE Partial partial(float y_max) const { return {y_max, quiet_nan(), {c[0], c[1], c[2]}, {0, 0, 0}}; }
};
static_assert(sizeof(PartOfRow) == 64);

constexpr int64_t kCountedWords = 32, kMostStates = 256;  // of rows beside a forward

// What launch_count has made of a row, once it has.
enum RowState : int32_t { kUndecided = 0, kDone = 1, kLeft = 2 };

struct Workspace {
  Head* heads;          // [rows]
  PartOfRow* parts;     // [rows, kMostParts]
  int64_t* candidates;  // [rows, kCandidateWords]: bits of z, and the column below; or a Candidate's
  float* maxima;        // [rows, kRowMaxima] of groups
  int32_t* words;       // GroupMaxima's: kForwardWords, and
  int32_t* states;      // [kMostStates]: a RowState
  int32_t* counted;     // [rows, kCountedWords]
  uint32_t* depths;     // [rows, kDepths], how many columns
  uint32_t* noise;      // [rows, kNoiseWords]: make_noise's

  __host__ __device__ Workspace(void* memory, int64_t rows)
      : heads(static_cast<Head*>(memory)),
        parts(reinterpret_cast<PartOfRow*>(heads + rows)),
        candidates(reinterpret_cast<int64_t*>(parts + rows * kMostParts)),
        maxima(reinterpret_cast<float*>(candidates + rows * kCandidateWords)),
        words(reinterpret_cast<int32_t*>(maxima + rows * kRowMaxima)),
        states(words + kForwardWords),
        counted(states + kMostStates),
        depths(reinterpret_cast<uint32_t*>(counted + kCountedWords * rows)),
        noise(depths + kDepths * rows) {}

  static int32_t word_count(int64_t rows) {
    return static_cast<int32_t>(kForwardWords + kMostStates + rows * (kCountedWords + kDepths));
  }
  VS_DEVICE Counted& counted_of(int64_t n) const { return *reinterpret_cast<Counted*>(counted + kCountedWords * n); }
  // Whether the forward that this grid waits for goes on for a while: fewer than so many of its CTAs have ended.
  VS_DEVICE bool early(int32_t ctas) const { return *static_cast<volatile const int32_t*>(words + kEndedWord) < ctas; }
};

// Who waits beside a forward looks at words that all its CTAs add to: as rarely as it can, or the forward feels it.
constexpr uint32_t kRarely = 2000, kOften = 100;  // ns
constexpr int kMostLooks = 500;                   // then the grid before is waited for

// Until a word has come to what is `wanted`, or nearly if that will do. False: it takes too long.
VS_DEVICE bool wait_for_word(const int32_t* word, int32_t wanted, bool nearly) {
  const int32_t near = wanted - wanted / 8;
  for (int i = 0; i < kMostLooks; ++i) {
    const int32_t x = ptx::load_acquire(word);
    if (x >= (nearly ? near : wanted)) return true;
    ptx::pause(x < near ? kRarely : kOften);
  }
  return false;
}

// By all threads of a CTA: until so many CTAs of the forward have ended. Some 2 us sooner than by waiting for its grid.
VS_DEVICE void wait_for_forward(const int32_t* words, int32_t ctas) {
  const bool there = threadIdx.x > 0 || wait_for_word(words + kEndedWord, ctas, false);
  if (__syncthreads_or(!there)) ptx::grid_wait();
}

constexpr int64_t kRowBytes =
    sizeof(Head) + kMostParts * sizeof(PartOfRow) + 8 * kCandidateWords +
    4 * (kRowMaxima + kForwardWords + kMostStates + kCountedWords + kDepths + kNoiseWords);  // for each row
static_assert(kRowBytes % 128 == 0 && 4 * kRowMaxima % 128 == 0 && kForwardWords % 32 == 0, "rows are aligned");

// Columns of one row.
struct Columns {
  const float* row;  // aligned to 16
  int32_t valid;
  int64_t vocab_start;

  // Four of them; what is past the row's end is -inf.
  VS_DEVICE float4 four(int32_t column) const {
    if (column + 4 <= valid) return *reinterpret_cast<const float4*>(row + column);
    float4 v = make_float4(neg_inf(), neg_inf(), neg_inf(), neg_inf());
    if (column < valid) v.x = row[column];
    if (column + 1 < valid) v.y = row[column + 1];
    if (column + 2 < valid) v.z = row[column + 2];
    return v;
  }
};

VS_DEVICE Columns columns_of(const SamplingRows& p, int64_t n) {
  return {p.logits + n * p.row_stride, static_cast<int32_t>(p.valid), p.vocab_start};
}

// One row, or one that is made up: a kernel that has to wait runs on it first, which fetches its code, and stores
// nothing.
struct Row {
  int64_t n;
  Columns columns;
  float scale;
  int64_t key;  // of its noise
  bool real;
};

VS_DEVICE float scale_of(const SamplingRows& p, int64_t n) { return p.scales ? p.scales[n] : p.scale; }

// Whether a row can be cut: all of its columns are kept where not.
VS_DEVICE bool usable(const Row& row, float y_max) { return in_range(y_max) && !is_nan(row.scale); }

VS_DEVICE float largest(const float4& v) { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); }

// `mine` of all threads of the CTA in one, known to all. s: a word of K for every warp, free again behind a barrier.
template <int kWarps, int K, class Op>
VS_DEVICE Words<K> over_block(int64_t (*s)[kLimbs], Words<K> mine, const Op& op) {
  static_assert(K <= kLimbs && (kWarps & (kWarps - 1)) == 0);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) mine = op(mine, of_lane(mine, step));
  const uint32_t lane = threadIdx.x % 32;
  __syncthreads();  // the last one's words are read
  if (lane == 0)
    for (int k = 0; k < K; ++k) s[threadIdx.x / 32][k] = mine.x[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) mine.x[k] = s[lane % kWarps][k];
#pragma unroll
  for (int step = kWarps / 2; step > 0; step /= 2) mine = op(mine, of_lane(mine, step));
  return mine;
}

// The sum of `mine` of the threads before this one and of this one. s: as above.
template <int kWarps>
VS_DEVICE int64_t up_to_thread(int64_t (*s)[kLimbs], int64_t mine) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, mine, step);
    if (lane >= step) mine += other;
  }
  __syncthreads();  // the last one's words are read
  if (lane == 31) s[warp][0] = mine;
  __syncthreads();
  return mine + sum_of_warp(lane < warp ? s[lane][0] : 0);
}

constexpr int64_t kNobody = INT64_MAX;
VS_DEVICE int64_t who_is(int64_t id, float z) { return (id << 32) + static_cast<uint32_t>(order_of(z)); }

VS_DEVICE Row row_of(const SamplingRows& p, int64_t n) {
  return {n, columns_of(p, n), scale_of(p, n), p.draw ? p.row_keys[n] : 0, true};
}

// The partial of all columns, for every thread of a CTA.
template <int kThreads>
VS_DEVICE Partial uncut_of(const SamplingStream& call, int64_t n, Partial* of_warp) {
  if (call.unmerged.partials != nullptr) return merge_row<kThreads>(call.unmerged, n, of_warp);
  return record_load<false>(call.uncut + n, call.rows.rows);
}

// What a row is scored at, where it is given: a column that is not here is NaN.
struct Target {
  int64_t id;
  float z;
};

VS_DEVICE int64_t target_id_of(const SamplingRows& p, int64_t n) { return p.target_ids ? p.target_ids[n] : -1; }
VS_DEVICE Target target_of(const Row& row, int64_t id) {
  const int64_t local = id - row.columns.vocab_start;
  const bool here = id >= 0 && local >= 0 && local < row.columns.valid;
  return {id, here ? row.columns.row[local] : quiet_nan()};
}

// A row's results, by a warp whose lanes all have them: `partial` has the sums of what is kept. In line, where `call`
// is a kernel's parameter: by an address, every field of it is read from memory.
VS_DEVICE void put_row(const SamplingStream& call, const Row& row, const Target& given, int64_t cut,
                       const Words<2>& first, Partial partial) {
  const SamplingRows& p = call.rows;
  const int64_t n = row.n;
  const bool some = p.draw && first.x[0] != kNoArrival, stores = row.real && threadIdx.x % 32 == 0;
  const int64_t id = some ? first.x[1] >> 32 : -1;
  if (stores) {
    p.cut[n] = cut;
    if (p.draw) {
      p.drawn[n] = first.x[0];
      p.drawn[p.rows + n] = id;
      p.drawn[2 * p.rows + n] = some ? static_cast<int32_t>(static_cast<uint32_t>(first.x[1])) : order_of(neg_inf());
    }
  }
  const bool drawn = p.target_ids == nullptr;
  float z = given.z;
  if (drawn && some) {
    z = logit_of(static_cast<int32_t>(static_cast<uint32_t>(first.x[1])));
    if (z == 0.0f) z = row.columns.row[id - row.columns.vocab_start];  // its sign
  }
  const bool left_out = !drawn && is_cut(z, given.id, cut_logit(cut), cut_tie(cut));
  partial.y_target = left_out ? neg_inf() : mul(z, row.scale);
  partial_finish(partial);
  if (call.folds)
    fold_row_by_warp(row.real ? call.fold : FoldRows{}, n, partial, drawn ? id : given.id);
  else if (stores)
    record_store<false>(p.records + n, p.rows, partial);
}

}  // namespace vocabshard::sm90::sampling
