// What the forward kernels are given. N rows of hidden, D deep, V_local columns.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "sm90/launch.h"
#include "sm90/schedule.h"

namespace vocabshard::sm90 {

enum BiasType : int32_t { kBiasNone = 0, kBiasFloat = 1, kBiasBfloat16 = 2, kBiasHalf = 3 };

inline int32_t bias_type(const void* bias, int32_t element) {
  return bias == nullptr ? kBiasNone : element == kFloat ? kBiasFloat : element == kHalf ? kBiasHalf : kBiasBfloat16;
}

// From the chain to y, and what is kept of it: the same for every forward kernel.
struct RowWork {
  const void* bias;  // [columns], of bias_type
  int32_t bias_type;
  int32_t rows;
  int32_t columns;  // V_local
  int32_t valid;    // leading columns that are real
  int64_t vocab_start;
  const int64_t* target_ids;         // [rows], global
  const float* row_inv_temperature;  // [rows] or null
  float inv_temperature;             // used when scaled and there is none by row
  float cap;                         // 0: no softcap
  const int64_t* cut;                // [rows] or null: place of the last kept column
  bool scaled;
  float* logits;          // [rows, columns] or null
  int64_t logits_stride;  // elements a row
  GroupMaxima maxima;     // beside logits
  KeptRows kept;          // of these rows
};

constexpr int kDepth = 64;  // elements of k a stage holds: 128 bytes, the swizzle's width
constexpr int kStages = 5;

// A consumer's tile.
struct WgmmaShape {
  int m_blocks;  // 64 rows each
  int groups;    // 64 columns each
};

// hidden and weight as the tensor copy engine reads them: see mainloop.cuh.
struct alignas(128) Operands {
  CUtensorMap hidden;    // {D, N}, box {64, hidden_rows}
  CUtensorMap tile;      // whole groups of 64 columns permuted, box of a whole tile; none where columns are shared
  CUtensorMap group;     // the same, box of one group, or half of it where columns are shared
  CUtensorMap tail;      // {D, V_local} as it lies, box of a group or half: for the last V_local mod 64 columns
  bool share_columns;    // the two CTAs of a cluster: the same columns of different rows, else the other way round
  bool read_once;        // nobody else wants what is read of weight: it need not stay in L2
  int32_t k_blocks;      // ceil(D / 64)
  int32_t whole_groups;  // V_local / 64
  int32_t hidden_rows;   // half a block, or a block where columns are shared; fewer where N is less
};

// Tokens to be drawn beside.
struct DrawWork {
  int64_t seed;
  const int64_t* row_keys;  // [rows], or null: 0, 1, 2, ...
  int64_t* winners;         // [CTAs][2 words][64 rows] (draw.h)
};

// Where the forward leaves columns that may be among a row's best (topk_collect.cuh). A row group is 8 rows of a warp.
struct ListState;
struct TopkLists {
  int32_t n, limit, capacity;  // entries of a lane's list, after a tile and in it
  const int64_t* best;         // [rows, n] places, descending: the last is the first bound
  const int64_t* place;        // [rows], of the targets
  unsigned long long* before;  // [rows]: the columns that are better are added
  ListState* states;           // [CTAs][places][4 warps][row groups][32 lanes]
  int2* lists;                 // [CTAs][places][4 warps][row groups][capacity][32 lanes]: bits of z, local column
  int2* scratch;               // [CTAs][4 warps][kMostTop]
};

struct alignas(128) WgmmaParams {
  Operands operands;
  RowWork work;
  Schedule schedule;
  float* target_y;    // [rows]: written where the target is a valid column here
  int64_t* partials;  // [clusters][2 CTAs][places of the schedule][record words][rows of a block]
  DrawWork draw;
  TopkLists top;
};

}  // namespace vocabshard::sm90
