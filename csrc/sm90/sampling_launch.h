// Launch functions of the sampling kernels (docs/operators/sampling.md) over a block of fp32 logits: raw pointers, a
// stream of the current device. Nothing synchronises, everything can be captured in a graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace vocabshard::sm90 {

enum SamplingKind : int32_t { kTopK = 0, kTopP = 1, kMinP = 2, kGreedy = 3 };

struct SamplingStep {
  int32_t kind;
  bool scaled;     // whether the scale acts here
  int64_t number;  // top_k: k; top_p: P
  double ln;       // min_p: ln m
};

constexpr int kMostSamplingSteps = 8;
constexpr int kMostBest = 1024;

// One launch for whole rows: cuts, tokens, truncated records, best ids and ranks of the columns that this rank has.
struct SamplingRows {
  const float* logits;  // [rows, ...] before temperature, column stride 1
  int64_t row_stride, rows, valid, vocab_start;
  const float* scales;  // y = z * scale: [rows], or null: the scalar
  float scale;

  bool whole;     // no rank has more columns of these rows
  int32_t steps;  // truncations; only of whole rows
  SamplingStep step[kMostSamplingSteps];
  const int64_t* given_cut;  // [rows] or null: every column
  int64_t* cut;              // [rows] or null: given_cut together with the steps

  bool draw;
  int64_t seed;
  const int64_t* row_keys;    // [rows]
  int64_t* drawn;             // [3, rows]: arrival, id, order
  const int64_t* target_ids;  // [rows] or null: of the record; the token that was drawn
  int64_t* records;           // [4, rows] of the kept columns, or null
  bool records_there;         // all columns are kept, and the records lack the target alone

  int32_t best_count;
  int64_t* best;         // [rows, best_count] places, descending
  const int64_t* place;  // [rows] or null
  int64_t* before;       // [rows]: how many places are larger
  int64_t* maxima;       // [rows] or null: the largest place
};

// Columns that a row may have.
int64_t sampling_rows_columns();
void launch_sampling_rows(const SamplingRows& call, cudaStream_t stream);

struct SamplingHistogram {
  const float* logits;
  int64_t row_stride, rows, valid, vocab_start;
  const float* scales;
  float scale;
  const int32_t* k_max;
  const int64_t *cut, *prefix;  // [rows]
  int32_t level;
  int64_t *counts, *masses;  // [rows, bins], zero before; masses may be null
};

void launch_sampling_histogram(const SamplingHistogram& call, cudaStream_t stream);

// out [rows]: global id of the nth column with that order, or -1. A row stops where it has found it.
void launch_sampling_equal(const float* logits, int64_t row_stride, int64_t rows, int64_t valid, int64_t vocab_start,
                           const int64_t* order, const int64_t* nth, int64_t* out, cudaStream_t stream);

}  // namespace vocabshard::sm90
