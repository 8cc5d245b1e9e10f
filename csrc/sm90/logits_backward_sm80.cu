#include "sm90/logits_backward.cuh"
#include "sm90/logits_launch.cuh"

namespace vocabshard {

namespace {

using namespace logits;

template <typename T>
void launch(const BackwardParams& params, bool entropy, cudaStream_t stream) {
  if (params.first == nullptr) {
    if (entropy)
      launch_backward<T, true, false>(params, stream);
    else
      launch_backward<T, false, false>(params, stream);
  } else if (entropy) {
    launch_backward<T, true, true>(params, stream);
  } else {
    launch_backward<T, false, true>(params, stream);
  }
}

}  // namespace

void logits_backward(const Matrix& logits, const int64_t* first, const int64_t* order, const RowInputs& rows,
                     const Problem& problem, const RowGradients& gradients, const LogitsUpstream& upstream,
                     const Matrix& grad_logits, void* stream) {
  if (logits.rows == 0 || logits.cols == 0) return;
  const int64_t bytes = logits.dtype == kF32 ? 4 : 2;
  BackwardParams params = {};
  params.logits = static_cast<const char*>(logits.data);
  params.out = static_cast<char*>(grad_logits.data);
  params.logits_stride = logits.row_stride * bytes;
  params.out_stride = grad_logits.row_stride * bytes;
  params.rows = logits.rows;
  params.columns = logits.cols;
  params.valid = problem.valid;
  params.first = first;
  params.order = order;
  params.inputs = rows;
  params.vocab_start = problem.vocab_start;
  params.gradients = gradients;
  params.upstream = upstream;
  params.shares = static_cast<uint32_t>(multiprocessors() * kWorkersOfRing);
  const auto s = static_cast<cudaStream_t>(stream);
  const bool entropy = gradients.softmax != nullptr ? gradients.entropy != nullptr : upstream.entropy != nullptr;
  if (logits.dtype == kBF16)
    launch<BF16>(params, entropy, s);
  else if (logits.dtype == kF16)
    launch<F16>(params, entropy, s);
  else
    launch<F32>(params, entropy, s);
}

}  // namespace vocabshard
