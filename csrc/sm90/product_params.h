// What the product kernels are given.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "sm90/dlogits.h"

namespace vocabshard::sm90 {

constexpr int kProductDepth = 64;     // elements of k a stage holds: 128 bytes, the swizzle's width
constexpr int kProductColumns = 128;  // of a tile

struct alignas(128) ProductParams {
  CUtensorMap a, b;
  const float* init;  // or null
  int64_t init_row;
  void* out;
  int64_t out_row;
  int32_t output;             // ProductOutput
  const uint8_t* row_active;  // or null
  const uint64_t* row_mask;   // or null
  int32_t rows, columns;      // M, C
  int32_t k_steps;            // ceil(K / 16)
  int32_t m_tiles, n_tiles;   // of a cluster
  DlogitsKeptCall turn;       // kept logits that idle warps turn into dlogits; codes null: none
  uint32_t pause;  // nanoseconds between some reads or writes of accumulators and the next, see product_pause
};

}  // namespace vocabshard::sm90
