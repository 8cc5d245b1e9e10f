// Gradient of the logits for a block of vocabulary columns: host side. Raw pointers, strides in elements, a stream of
// the current device; nothing synchronises, nothing is allocated, everything can be captured in a graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace vocabshard::sm90 {

// What a row's gradient is made of, so that the kernel finds all of it in two loads.
//   log2 p = y c + minus_int - frac;   dz = p * (factor + slope * log2 p), at the target + target_grad
struct alignas(16) DlogitsRow {
  float minus_int, frac;  // lse * c = frac - minus_int
  float factor, slope;    // with the factor of the temperature, as target_grad
  float scale;            // inverse temperature
  float target_grad;
  int32_t target;  // column of this shard, or -1
  uint32_t keep;   // all bits, or none: the row counts for nothing
};

// Upstream gradients, fp32 of any stride or null where nothing flows, as coefficients of the target and the softmax: a
// row whose target is not scored sends nothing through logp.
struct RowGradsCall {
  int64_t rows;
  const float *logp, *lse, *entropy;
  int64_t logp_stride, lse_stride, entropy_stride;
  const int64_t* target_ids;
  int64_t ignore_index, real_vocab_size;
  float *grad_target, *grad_softmax, *grad_entropy;  // all [rows]; the last is null where `entropy` is
};

void launch_row_grads(const RowGradsCall& call, cudaStream_t stream);

struct DlogitsRowsCall {
  int64_t rows;
  const int32_t* lse2_int;  // all [rows]
  const float* lse2_frac;
  const float* entropy;      // or null, as the gradient of the entropy
  const float* grad_target;  // not read if from_upstream
  const float* grad_softmax;
  const float* grad_entropy;
  bool from_upstream;
  RowGradsCall upstream;      // what it would write is worked out here
  const int64_t* target_ids;  // global
  int64_t vocab_start, valid;
  const float* row_inv_temperature;  // or null
  float inv_temperature;
  DlogitsRow* terms;  // all [rows]
  uint8_t* active;    // 1: the row has an upstream gradient
  // Which rows must be kept from a product over rows: without a gradient, and 0 times what they hold is not 0. Bit i of
  // word b is row 64 b + i. hidden null: not asked for.
  uint64_t* broken;
  int32_t element;  // kBfloat16 or kHalf
  int64_t depth;
  const void* hidden;  // rows on 16 bytes
  int64_t hidden_row;
};

void launch_dlogits_rows(const DlogitsRowsCall& call, cudaStream_t stream);

struct DlogitsCall {
  int32_t element;               // of hidden, weight and out: kBfloat16 or kHalf
  int64_t rows, depth, columns;  // columns of the block, all of them real vocabulary
  const void* hidden;            // [rows, depth]
  int64_t hidden_row;
  const void* weight;  // [columns, depth]: from the block's first row on
  int64_t weight_row;
  const void* bias;  // [columns] from the block's first on, or null
  int32_t bias_element;
  float softcap;                // 0: none
  bool plain;                   // neither softcap, temperature, gradient of the entropy nor cut
  int64_t first_column;         // of the block in the shard
  const DlogitsRow* row_terms;  // [rows]
  bool behind_terms;            // launch_dlogits_rows was the launch before, and nothing else since
  void* out;                    // [rows, out_row]: zero in columns from `columns` up to the next multiple of 64
  int64_t out_row;              // a multiple of 8 elements, not below that
  float* bias_sums;             // [ceil(rows / 128), out_row]: sums of dz over blocks of 128 rows; or null
  const int64_t* cut;           // [rows], places of the last kept columns (sampling.h), or null: columns left out get 0
  int64_t first_id;             // global, of the block's first column; used with a cut
};

void launch_dlogits(const DlogitsCall& call, cudaStream_t stream);

// The same of rows that were kept (kept_code.h), to bf16. Their y have bias and temperature in them; no softcap.
struct DlogitsKeptCall {
  int64_t rows, columns;    // columns of the block, all of them real vocabulary
  const uint16_t* codes;    // [rows, codes_row] from the block's first column on
  int64_t codes_row;        // a multiple of 8, as out_row
  const float* references;  // of the block's group g and row n: [g * references_group + n]
  int64_t references_group;
  const float* target_y;        // [rows], read where the row's target is in this shard
  bool plain;                   // no gradient of the entropy
  int64_t first_column;         // of the block in the shard, a multiple of 64
  const DlogitsRow* row_terms;  // [rows]
  void* out;                    // [rows, out_row], all columns of the block's groups; may be `codes`
  int64_t out_row;
  float* bias_sums;  // [ceil(rows / 128), sums_row]: sums of dz over blocks of 128 rows; or null
  int64_t sums_row;
};

void launch_dlogits_kept(const DlogitsKeptCall& call, cudaStream_t stream);

// grad_bias[columns], of bias_element, from the sums of all blocks of rows, in ascending order.
void launch_bias_sums(const float* sums, int64_t blocks, int64_t stride, int64_t columns, void* grad_bias,
                      int32_t bias_element, cudaStream_t stream);

}  // namespace vocabshard::sm90
