// The best columns of each row, and the place of its target among all (docs/operators/sampling.md): raw pointers, a
// stream of the current device. Nothing synchronises, everything can be captured in a graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/launch.h"

namespace vocabshard::sm90 {

constexpr int kMostTop = 128;  // best columns a row

// The places of the targets that are columns here, with the bytes that the forward gives their logits; else -2^63.
struct TopkTarget {
  int32_t element;  // bf16 or fp16
  int64_t rows, depth;
  const void* hidden;
  int64_t hidden_row;  // column strides are 1, rows begin at multiples of 4 bytes
  const void* weight;
  int64_t weight_row;
  const void* bias;  // or null
  int32_t bias_element;
  float softcap;  // 0: none
  int64_t vocab_start, valid;
  const int64_t* target_ids;
  int64_t* place;  // [rows]
};

void launch_topk_target(const TopkTarget& call, cudaStream_t stream);

// From what all ranks found to the results.
struct TopkFinish {
  const int64_t* records;  // [parts, 4 or 7, rows], folded in ascending order
  int64_t parts, rows;
  bool entropy;
  const int64_t* best;  // [ranks, rows, n], each descending
  int64_t ranks;
  int32_t n;
  const int64_t* before;  // [rows]: over all ranks
  const int64_t* target_ids;
  const float* scales;  // y = z * scale: [rows], or null: the scalar
  float scale;
  const int64_t* cut;  // [rows] or null: columns beyond it have log-prob -inf
  int64_t* ids;        // [rows, n], -1 where there are fewer columns
  float* logp;         // [rows, n]
  int64_t* rank;       // [rows]: of the target, from 1; 0 where it is no column
  FoldRows fold;       // of the target
};

void launch_topk_finish(const TopkFinish& call, cudaStream_t stream);

// Over a block of fp32 logits.
struct TopkScan {
  const float* logits;  // [rows, ...] before temperature, column stride 1
  int64_t row_stride, rows, valid, vocab_start;
  int32_t n;
  const int64_t* target_ids;  // [rows], or null: nothing is counted
  const int64_t* place;       // [rows]: the targets' places; null: they are among these columns, or there is none
  int64_t* best;              // [rows, n] places, descending, filled up with -2^63
  int64_t* before;            // [rows]: columns here whose places are larger than the target's
  bool finishes;              // no other rank has columns: the results at once, in place of best and before
  TopkFinish finish;          // without best, ranks and before
};

// Whether a launch has the memory for it.
bool topk_scan_fits(int64_t valid, int32_t n);
void launch_topk_scan(const TopkScan& call, cudaStream_t stream);

}  // namespace vocabshard::sm90
