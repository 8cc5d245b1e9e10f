// The gradients' products: out[M, C] = init + A[M, K] @ B[K, C], one ascending chain over K an element. Raw pointers,
// strides in elements, a stream of the current device; nothing synchronises, nothing is allocated.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/dlogits.h"

namespace vocabshard::sm90 {

enum ProductOutput : int32_t {
  kProductFloat = 0,   // fp32, stored
  kProductAdd = 1,     // fp32, added to what is there, with one rounding; not transposed, in memory
  kProductElement = 2  // rounded to the operands' type
};

// Operands lie as they are in memory, rows along their last axis, and are bf16 or fp16, both the same. Bases on 16
// bytes, row strides multiples of 8 elements (init and out in fp32: of 4), C a multiple of 8.
struct ProductCall {
  int32_t element;               // kBfloat16 or kHalf
  bool transposed;               // A is given as [K, M]
  int64_t rows, depth, columns;  // M, K, C
  const void* a;
  int64_t a_row;
  const void* b;  // [K, C]
  int64_t b_row;
  const float* init;  // [M, C] that the chain goes on from, or null: zero. May be `out`, and is if not transposed.
  int64_t init_row;
  void* out;  // [M, C]
  int64_t out_row;
  int32_t output;
  // Rows of A, not transposed: where it is 0, `out` stays what `init` is, whatever B holds. Or null.
  const uint8_t* row_active;  // [M]
  // Rows of B, A transposed: where bit i of word b is set, row 64 b + i counts as zeros, whatever it holds. Or null.
  const uint64_t* row_mask;  // [ceil(K / 64)]
  // A transposed, bf16, no init: kept logits that warps without other work turn into dlogits where they lie, none of
  // them A's. codes null: none.
  DlogitsKeptCall turn;
};

void launch_product(const ProductCall& call, cudaStream_t stream);

}  // namespace vocabshard::sm90
