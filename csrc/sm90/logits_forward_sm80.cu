// The choice among the forward kernels over logits.
#include <stdexcept>

#include "sm90/logits_forward.cuh"
#include "sm90/logits_forward_types.h"

namespace vocabshard::sm90 {

using namespace logits;

namespace {

constexpr int64_t kTableElements = 1ll << 23;  // fewer do not repay filling the table
constexpr int kOtherShared = 12 * 1024;        // of a block with a table, beside it

}  // namespace

int64_t logits_workspace_bytes() {
  const int64_t shared = max(most_workers() * 2 * kPartialWords, most_parts() * (1 + kLimbs));
  return 4 * zeroed_words() + 8 * shared;
}
int64_t logits_workspace_zeroed_bytes() { return 4 * zeroed_words(); }

void logits_forward(const Matrix& logits, const int64_t* source, int64_t outputs, const RowInputs& rows,
                    const Problem& problem, int64_t* records, const LogitsFold& fold, void* workspace, void* stream) {
  if (outputs == 0) return;
  if (problem.valid > 0x7fff0000 || outputs > 0x7fffffff)
    throw std::invalid_argument("forward over logits: at most 2^31 rows, and columns of a shard");
  const int64_t bytes = logits.dtype == kF32 ? 4 : 2;
  ForwardParams params = {};
  params.logits = static_cast<const char*>(logits.data);
  params.row_stride = logits.row_stride * bytes;
  params.logits_rows = logits.rows;
  params.logits_end = params.logits + (logits.rows - 1) * params.row_stride + problem.valid * bytes;
  params.source = source;
  params.outputs = outputs;
  params.valid = static_cast<int32_t>(problem.valid);
  params.rows = rows;
  params.vocab_start = problem.vocab_start;
  params.records = records;
  params.fold = fold;
  const float scale = rows.scalar_inv_temperature;
  ForwardChoice choice = {};
  choice.entropy = problem.entropy;
  choice.scaled = rows.inv_temperature != nullptr || scale != 1.0f;
  choice.aligned = reinterpret_cast<uintptr_t>(logits.data) % 16 == 0 && params.row_stride % 16 == 0;
  choice.table = rows.inv_temperature == nullptr && scale >= Table::kLeastScale && scale <= Table::kMostScale &&
                 outputs * problem.valid >= kTableElements &&
                 current_device().shared_bytes >= static_cast<int>(Table::kBytes) + kOtherShared;
  const auto s = static_cast<cudaStream_t>(stream);
  if (logits.dtype == kBF16 && choice.table && !choice.entropy && choice.aligned && current_device().capability == 9)
    forward_bf16_ring(params, choice, workspace, s);
  else if (logits.dtype == kBF16 && choice.table && !choice.entropy)
    forward_bf16_table(params, choice, workspace, s);
  else if (logits.dtype == kBF16)
    forward_bf16(params, choice, workspace, s);
  else if (logits.dtype == kF16)
    forward_f16(params, choice, workspace, s);
  else
    forward_f32(params, choice, workspace, s);
}

}  // namespace vocabshard::sm90
