// The choice among the backward kernels over logits.
#include "sm90/logits_backward.cuh"

namespace vocabshard::sm90 {

namespace {

using namespace logits;

template <typename T>
void launch(const BackwardParams& params, bool entropy, cudaStream_t stream) {
  constexpr int kThreads = 128, kVectors = 8, kRounds = 1;
  const bool scaled = params.inputs.inv_temperature != nullptr || params.inputs.scalar_inv_temperature != 1.0f;
  if (params.first != nullptr && entropy)
    launch_backward<T, true, true, true, kThreads, kVectors, kRounds>(params, stream);
  else if (params.first != nullptr)
    launch_backward<T, false, true, true, kThreads, kVectors, kRounds>(params, stream);
  else if (entropy)
    launch_backward<T, true, true, false, kThreads, kVectors, kRounds>(params, stream);
  else if (scaled)
    launch_backward<T, false, true, false, kThreads, kVectors, kRounds>(params, stream);
  else
    launch_backward<T, false, false, false, kThreads, kVectors, kRounds>(params, stream);
}

}  // namespace

void logits_backward(const Matrix& logits, const int64_t* first, const int64_t* order, const RowInputs& rows,
                     const Problem& problem, const RowGradients& gradients, const LogitsUpstream& upstream,
                     const Matrix& grad_logits, void* stream) {
  if (logits.rows == 0 || logits.cols == 0) return;
  if (logits.cols > 0x7fff0000) throw std::invalid_argument("backward over logits: at most 2^31 columns of a shard");
  const int64_t bytes = logits.dtype == kF32 ? 4 : 2;
  BackwardParams params = {};
  params.logits = static_cast<const char*>(logits.data);
  params.out = static_cast<char*>(grad_logits.data);
  params.logits_stride = logits.row_stride * bytes;
  params.out_stride = grad_logits.row_stride * bytes;
  params.rows = logits.rows;
  params.columns = static_cast<int32_t>(logits.cols);
  params.valid = static_cast<int32_t>(problem.valid);
  params.first = first;
  params.order = order;
  params.inputs = rows;
  params.vocab_start = problem.vocab_start;
  params.gradients = gradients;
  params.upstream = upstream;
  const auto s = static_cast<cudaStream_t>(stream);
  const bool entropy = gradients.softmax != nullptr ? gradients.entropy != nullptr : upstream.entropy != nullptr;
  if (logits.dtype == kBF16)
    launch<BF16>(params, entropy, s);
  else if (logits.dtype == kF16)
    launch<F16>(params, entropy, s);
  else
    launch<F32>(params, entropy, s);
}

}  // namespace vocabshard::sm90
