// fp32 products of the gradients: host side. Raw pointers, strides in elements, a stream of the current device; nothing
// synchronises, nothing is allocated.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace vocabshard::sm90 {

// out[M, C] += A[M, K] @ B[K, C]: each element is one ascending chain of fp32 FMAs that goes on from what is in out.
struct FmaProductCall {
  int64_t rows, depth, columns;  // M, K, C
  const float* a;
  int64_t a_row, a_column;  // one of them 1
  const float* b;           // columns side by side
  int64_t b_row;
  float* out;  // columns side by side
  int64_t out_row;
};

void launch_fma_product(const FmaProductCall& call, cudaStream_t stream);

}  // namespace vocabshard::sm90
