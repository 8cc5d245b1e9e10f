// Kernels for logits that exist: what they take, and the launches. N rows, V_local columns, M output rows.
//
// Asynchronous on `stream` (a cudaStream_t of the current device); nothing is allocated and nothing synchronises.
// They throw std::runtime_error for CUDA's errors.
#pragma once

#include "api.h"

namespace vocabshard::sm90 {

// The fold of a row, for callers without a group. Outputs that are not wanted may be logp's memory: it is written last.
struct LogitsFold {
  FoldOutputs out;
  int64_t ignore_index = -100;
  int64_t real_vocab_size = 0;
  bool invalid_is_nan = true;
};

// Bytes of workspace on the current device, the same for every problem, and how many of them, the first, are zero
// before the first launch that uses it. After every launch they are zero again: launches in one stream can share it.
int64_t logits_workspace_bytes();
int64_t logits_workspace_zeroed_bytes();

// records [R, M] (contract.h); or, with records == nullptr, fold.out. source[m]: the row of logits that output row m
// reads; nullptr: m. A row that does not exist gives NaN, and nothing is read.
void logits_forward(const Matrix& logits, const int64_t* source, int64_t outputs, const RowInputs& rows,
                    const Problem& problem, int64_t* records, const LogitsFold& fold, void* workspace, void* stream);

// Upstream gradients as they come, fp32; nullptr: none. A stride of 0 is one number for all rows.
struct LogitsUpstream {
  const float* logp = nullptr;
  int64_t logp_stride = 1;
  const float* lse = nullptr;
  int64_t lse_stride = 1;
  const float* entropy = nullptr;  // with RowGradients::row_entropy
  int64_t entropy_stride = 1;
  int64_t ignore_index = -100;
  int64_t real_vocab_size = 0;
};

// Writes all of grad_logits [N, V_local], which may be the logits themselves. The output rows that read row n of the
// logits are order[first[n]] ... order[first[n + 1] - 1], and their gradients add up in that order; a row that none
// reads gets zeros. first == nullptr: output row n reads row n. gradients.softmax == nullptr: upstream says what its
// target, softmax and entropy are.
void logits_backward(const Matrix& logits, const int64_t* first, const int64_t* order, const RowInputs& rows,
                     const Problem& problem, const RowGradients& gradients, const LogitsUpstream& upstream,
                     const Matrix& grad_logits, void* stream);

}  // namespace vocabshard::sm90
