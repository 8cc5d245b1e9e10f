#include "sm90/logits_forward_types.h"
#include "sm90/logits_launch.cuh"

namespace vocabshard {

using namespace logits;

int64_t logits_workspace_bytes() { return most_workers() * (4 + 2 * 8 * kPartialWords); }

int64_t logits_workspace_zeroed_bytes() { return most_workers() * 4; }

void logits_forward(const Matrix& logits, const int64_t* source, int64_t outputs, const RowInputs& rows,
                    const Problem& problem, int64_t* records, const LogitsFold& fold, void* workspace, void* stream) {
  if (outputs == 0) return;
  ForwardParams params = {};
  params.logits = logits.data;
  params.row_stride = logits.row_stride;
  params.logits_rows = logits.rows;
  params.source = source;
  params.outputs = outputs;
  params.valid = problem.valid;
  params.rows = rows;
  params.vocab_start = problem.vocab_start;
  params.records = records;
  params.fold = fold;
  const int64_t bytes = logits.dtype == kF32 ? 4 : 2;
  ForwardChoice choice = {};
  choice.entropy = problem.entropy;
  choice.scaled = rows.inv_temperature != nullptr || rows.scalar_inv_temperature != 1.0f;
  choice.aligned =
      reinterpret_cast<uintptr_t>(logits.data) % 16 == 0 && (logits.rows == 1 || logits.row_stride * bytes % 16 == 0);
  const float scale = logits.dtype == kBF16 ? BF16::kTableScale : F16::kTableScale;
  choice.ring = !problem.entropy && rows.inv_temperature == nullptr && rows.scalar_inv_temperature >= scale &&
                problem.valid >= kRingColumns && outputs * problem.valid >= kRingElements && has_ring_memory();
  const auto s = static_cast<cudaStream_t>(stream);
  if (logits.dtype == kBF16)
    forward_bf16(params, choice, workspace, s);
  else if (logits.dtype == kF16)
    forward_f16(params, choice, workspace, s);
  else
    forward_f32(params, choice, workspace, s);
}

}  // namespace vocabshard
