// Launch functions of the CUDA side. No torch here: raw pointers, sizes, strides in elements, a stream of the current
// device. Nothing synchronises, nothing is allocated, everything can be captured in a graph. They throw
// std::invalid_argument for what they cannot take and std::runtime_error for CUDA's own errors.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/schedule.h"

namespace vocabshard::sm90 {

enum Element : int32_t { kBfloat16 = 0, kHalf = 1, kFloat = 2 };

// Which kernel. All of kRows128, kRows64 and kMma give the same bytes.
enum Path : int32_t {
  kAuto = 0,
  kRows128 = 1,  // wgmma, 128 rows x 192 columns a consumer
  kRows64 = 2,   // wgmma, 64 rows x 192 columns
  kMma = 3,      // mma.sync, any strides
  kFma = 4       // fp32
};

// How the merged record of a row is folded, and where its results go, [rows] each; null: not wanted.
struct FoldRows {
  int64_t ignore_index;
  bool has_ignore_index;
  int64_t real_vocab_size;
  bool invalid_is_nan;
  float* logp;
  float* lse;
  float* entropy;
  int32_t* lse2_int;
  float* lse2_frac;
  float* maximum;
};

// A token of every row, drawn of all its columns (docs/operators/sampling.md).
struct DrawRows {
  bool wanted;
  int64_t seed;
  const int64_t* row_keys;  // [rows], or null: 0, 1, 2, ...
};

// Where drawn tokens go, [rows] each.
struct DrawnRows {
  int64_t* tokens;
  int64_t* cut;  // gets kKeepAll
};

// What a forward leaves of its first rows for the backward (kept_code.h). Columns are those that are real, in groups
// of 64.
struct KeptRows {
  uint16_t* codes;    // [rows, codes_row], a code for each column of every group; null: nothing is kept
  int64_t codes_row;  // a multiple of 8
  float* references;  // of group g and row n: [g * references_group + n]
  int64_t references_group;
  int32_t rows, groups;
};

// The largest logit, before temperature, of every group of 64 columns: at [row * row_stride + column / 64]. NaN is
// none.
struct GroupMaxima {
  float* at;  // null: not wanted
  int64_t row_stride;
  int32_t* words;  // for who is launched beside; all 0 by then
  int32_t word_count;
};

// The first of those words: how many CTAs of the forward have ended, the first a sixth of the time before the last; and
// behind it, for every but the last of a CTA's tiles, how many warps have stored it. The rest belongs to who is beside.
constexpr int32_t kEndedWord = 0, kTileWord = 1, kToldTiles = 31, kForwardWords = 32;
constexpr int32_t kTellingWarps = 4;  // of a CTA

// The best columns are ranked beside, those of before and these, and those that are better than the target counted.
struct TopkRows {
  int32_t n;             // 0: nothing of it
  const int64_t* place;  // [rows] of the targets (sampling.h), kKeepAll: none
  int64_t* best;         // [rows, n] places, descending
  int64_t* before;       // [rows], added to
};

struct ForwardCall {
  int32_t element;  // of hidden and weight
  int64_t rows, depth, columns;
  const void* hidden;
  int64_t hidden_row, hidden_column;
  const void* weight;
  int64_t weight_row, weight_column;
  const void* bias;  // [columns] or null
  int32_t bias_element;
  int64_t vocab_start;
  int64_t valid;                     // leading columns that are real
  const int64_t* target_ids;         // [rows], global ids
  const float* row_inv_temperature;  // [rows] or null
  float inv_temperature;             // for all rows, if there is none by row; 1: none
  float softcap;                     // 0: none
  const int64_t* cut;                // [rows]: place of the last kept column (sampling.h), or null: all are kept
  bool entropy;
  float* logits;  // [rows, columns] or null
  int64_t logits_row;
  GroupMaxima maxima;  // beside logits, where gives_maxima
  KeptRows kept;       // by kRows128 and kRows64 alone
  DrawRows draw;       // by kRows64 alone, without a cut, entropy and target_ids
  DrawnRows drawn;     // without records
  TopkRows top;        // by kRows128 alone, without entropy, in one launch
  int64_t* records;    // [4 or 7, rows], with a draw [6, rows]; null: rows are folded at once, as of a group of one
  FoldRows fold;       // for then
  void* workspace;     // forward_workspace bytes, aligned to 256
  int32_t path;
};

// A pure function of the shape, the strides' fitness for TMA, and the device's number of multiprocessors.
struct ForwardPlan {
  int32_t path;
  int64_t chunk_rows;  // rows a launch takes
  int64_t workspace;   // bytes
  int32_t splits;      // of the vocabulary, for kMma and kFma
};

bool tma_can_read(const void* base, int64_t row_stride, int64_t column_stride);
ForwardPlan plan_forward(const ForwardCall& call, int32_t multiprocessors);
// Rows whose partials wait to be merged, by merge_row.cuh.
struct UnmergedRows {
  const int64_t* partials;  // as in WgmmaParams; null: there are none
  Schedule schedule;
  int32_t block_rows;
};

// `left`: where gives_maxima, rows are not merged, and there is no record.
void launch_forward(const ForwardCall& call, cudaStream_t stream, UnmergedRows* left = nullptr);

struct FoldCall {
  const int64_t* records;  // [ranks, 4 or 7, rows], merged in ascending order
  int64_t ranks, rows;
  const int64_t* target_ids;  // [rows]
  bool entropy;
  FoldRows fold;
};

void launch_fold(const FoldCall& call, cudaStream_t stream);
// records [ranks, 6, rows] of a draw: the first of the ranks' winners is the target.
void launch_fold_drawn(const FoldCall& call, const DrawnRows& drawn, cudaStream_t stream);

// Whether a forward that writes logits can give the maxima of its groups too, and leave rows to be merged; and by which
// schedule then.
bool gives_maxima(const ForwardCall& call, int32_t multiprocessors);
Schedule schedule_of_few(const ForwardCall& call, int32_t multiprocessors);
// Whether a forward can draw: by shape, strides, and where this rank's columns begin.
bool draws_beside(const ForwardCall& call, int32_t multiprocessors);

int32_t multiprocessor_count();  // of the current device

}  // namespace vocabshard::sm90
