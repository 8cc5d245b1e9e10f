// A whole backward that makes logits again: every launch of it, by one call or by two. Raw pointers, strides in
// elements, a stream of the current device; nothing synchronises, nothing is allocated, everything can be captured in a
// graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/dlogits.h"

namespace vocabshard::sm90 {

struct BackwardCall {
  DlogitsRowsCall rows;  // from upstream gradients; element, rows, depth and hidden are those of everything
  const void* hidden;    // [rows, depth], also where rows.hidden is null
  const void* weight;    // [valid, depth]
  int64_t weight_row;
  const void* bias;  // [valid] or null
  int32_t bias_element;
  float softcap;
  bool plain;
  void* dlogits;  // [rows, width] of a block
  int64_t width;
  float* bias_sums;  // [ceil(rows / 128), width] or null
  void* grad_bias;   // [valid], of bias_element; or null
  void* grad_hidden;
  int32_t hidden_output;  // ProductOutput; rounded only where one block has all columns, and one chain
  int64_t chain;          // columns of a chain of grad_hidden's, a sum of which it then is; 0: one chain
  void* grad_weight;      // [valid, depth] or null
  int64_t grad_weight_row;
  int32_t weight_output;  // ProductOutput
};

// All but the last block's part of grad_weight and grad_bias: grad_hidden is complete. `ends`: of blocks of columns.
void launch_backward_to_hidden(const BackwardCall& call, const int64_t* ends, int64_t blocks, cudaStream_t stream);
void launch_backward_rest(const BackwardCall& call, const int64_t* ends, int64_t blocks, cudaStream_t stream);

}  // namespace vocabshard::sm90
