// What the kernels take and give: plain structs of raw pointers, sizes and strides. The only host header of the module.
//
// N rows, D hidden size, V_local columns of this rank. Strides are in elements. Nothing here owns memory.
#pragma once

#include <cstdint>

namespace vocabshard {

enum DType : int { kF32 = 0, kBF16 = 1, kF16 = 2 };

struct Matrix {
  void* data = nullptr;
  int dtype = kF32;
  int64_t rows = 0, cols = 0;
  int64_t row_stride = 0, col_stride = 1;
};

struct Vector {  // data == nullptr: absent
  const void* data = nullptr;
  int dtype = kF32;
  int64_t stride = 1;
};

// What is known of each row besides its hidden state, [N] each and contiguous.
struct RowInputs {
  const int64_t* target_ids = nullptr;     // global
  const float* inv_temperature = nullptr;  // one per row; nullptr: the scalar
  float scalar_inv_temperature = 1.0f;     // 1: no multiplication (the same bits)
  const int64_t* cut = nullptr;            // place of the last kept column (sampling.h); nullptr: all are kept
};

struct Problem {
  int64_t vocab_start = 0;  // global id of local column 0
  int64_t valid = 0;        // leading columns that are real vocabulary
  float softcap = 0.0f;     // 0: none
  bool entropy = false;
};

// Rows saved by the fold and their upstream gradients, fp32 [N] unless said; nullptr: no entropy.
struct RowGradients {
  const int32_t* lse2_int = nullptr;
  const float* lse2_frac = nullptr;
  const float* row_entropy = nullptr;
  const float* target = nullptr;
  const float* softmax = nullptr;
  const float* entropy = nullptr;
};

// How a backward leaves its gradients.
struct GradientPlan {
  bool continue_hidden = false;  // grad_hidden holds accumulators: each goes on as one FMA chain, columns ascending
  bool add_weight = false;       // grad_weight is fp32 and added to, each element once
  Matrix kept;                   // what the forward kept
};

// How to run, never what comes out.
struct CpuRun {
  int threads = 1;
  int isa = -1;  // -1: the best this machine has; 0 baseline, 1 AVX2, 2 AVX-512
};

// records [R, N]: contract.h. logits.data == nullptr: not wanted; else fp32 [N, V_local]. kept.data == nullptr:
// nothing; else fp32 [rows, valid], the chains of the first rows.
void cpu_linear_forward(const Matrix& hidden, const Matrix& weight, const Vector& bias, const RowInputs& rows,
                        const Problem& problem, int64_t* records, const Matrix& logits, const Matrix& kept,
                        const CpuRun& run);

// grad_hidden fp32 [N, D], grad_weight [V_local, D] and grad_bias [V_local] in the parameter's dtype, all contiguous
// and overwritten unless `how` says otherwise; data == nullptr: not wanted.
void cpu_linear_backward(const Matrix& hidden, const Matrix& weight, const Vector& bias, const RowInputs& rows,
                         const Problem& problem, const RowGradients& gradients, const Matrix& grad_hidden,
                         const Matrix& grad_weight, const Matrix& grad_bias, const GradientPlan& how,
                         const CpuRun& run);

// source[m]: the row of logits that output row m reads; nullptr: m. Output rows are `outputs` many.
void cpu_logits_forward(const Matrix& logits, const int64_t* source, int64_t outputs, const RowInputs& rows,
                        const Problem& problem, int64_t* records, const CpuRun& run);

// Writes all of grad_logits, which may be the logits themselves.
void cpu_logits_backward(const Matrix& logits, const int64_t* source, int64_t outputs, const RowInputs& rows,
                         const Problem& problem, const RowGradients& gradients, const Matrix& grad_logits,
                         const CpuRun& run);

struct FoldOutputs {  // [N] each
  float* logp = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;  // nullptr: no entropy
  int32_t* lse2_int = nullptr;
  float* lse2_frac = nullptr;
  float* maximum = nullptr;
};

// gathered [W, words, N], folded in ascending rank order.
// out = fp32(1 / double(t)); NaN where t is no temperature (not positive, not finite).
void cpu_reciprocals(const float* t, int64_t count, float* out);

void cpu_fold(const int64_t* gathered, int64_t world_size, int64_t words, int64_t rows, const int64_t* target_ids,
              int64_t ignore_index, int64_t real_vocab_size, bool invalid_is_nan, const FoldOutputs& out);

// Sum modulo 2^64 of a hash of every 8-byte word of rows [first_row, first_row + rows) and of its place; a row's last
// word is filled up with zeros. Sums of parts add up to that of the whole.
uint64_t cpu_fingerprint(const void* data, int64_t rows, int64_t row_bytes, int64_t row_stride_bytes, int64_t first_row,
                         int threads);

// A block of fp32 logits before temperature, column stride 1; y = z * scale. Results are [N] unless said.
struct SamplingBlock {
  Matrix logits;
  int64_t vocab_start = 0, valid = 0;
  const float* scales = nullptr;  // one per row; nullptr: the scalar
  float scale = 1.0f;
};

// docs/operators/sampling.md says what each of these computes. counts and masses [N, bins of the level]; masses ==
// nullptr: not wanted. best: out [N, count].
void cpu_sampling_maxima(const SamplingBlock& block, int64_t* out, const CpuRun& run);
void cpu_sampling_histogram(const SamplingBlock& block, const int32_t* k_max, const int64_t* cut, const int64_t* prefix,
                            int level, int64_t* counts, int64_t* masses, const CpuRun& run);
void cpu_sampling_floor(const SamplingBlock& block, const float* threshold, int64_t* out, const CpuRun& run);
void cpu_sampling_equal(const SamplingBlock& block, const int64_t* order, const int64_t* nth, int64_t* out,
                        const CpuRun& run);
void cpu_sampling_draw(const SamplingBlock& block, const int64_t* cut, int64_t seed, const int64_t* row_keys,
                       int64_t* arrival, int64_t* id, int64_t* order, const CpuRun& run);
void cpu_sampling_best(const SamplingBlock& block, int64_t count, int64_t* out, const CpuRun& run);
void cpu_sampling_before(const SamplingBlock& block, const int64_t* place, int64_t* out, const CpuRun& run);

// Instruction sets: compiled in, usable on this machine (bit i: isa i), and the one that isa = -1 takes.
int cpu_isa_compiled();
int cpu_isa_usable();
int cpu_isa_chosen();
const char* cpu_isa_name(int isa);

// True if a compiler fused a product with a sum in any variant.
bool cpu_contraction_probe();

// The scalar text of contract.h, for tests.
void spec_exp(const float* y, int64_t count, int32_t* k, float* p);
void spec_log2(const double* x, int64_t count, int32_t* a, double* l);
void spec_softcap(const float* z, int64_t count, float cap, float* out);
void spec_clock(const uint32_t* x, const uint32_t* second, int64_t count, float* out);
void spec_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out);  // 4 words and 2 to 4
// z [N, V] by one FMA after the other.
void spec_fma_chain(const Matrix& hidden, const Matrix& weight, float* z);
// y [N, V]: tiles in the order `tile_order` (a permutation of all tiles) are split at `splits` (ascending positions in
// that order) into partials, merged in order. target: local column of each row, or -1.
void spec_partials(const float* y, int64_t rows, int64_t columns, const int64_t* target, const int64_t* tile_order,
                   int64_t tiles, const int64_t* splits, int64_t split_count, bool entropy, int64_t* records);

}  // namespace vocabshard
