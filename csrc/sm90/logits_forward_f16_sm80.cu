#include "sm90/logits_forward.cuh"
#include "sm90/logits_forward_types.h"

namespace vocabshard::sm90::logits {

void forward_f16(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream) {
  if (choice.entropy)
    launch_forward<F16, true, true, false, false, 4, 4, 1>(params, workspace, stream);
  else if (choice.scaled && choice.aligned)
    launch_forward<F16, false, true, true, false, 4, 6, 1>(params, workspace, stream);
  else if (choice.aligned)
    launch_forward<F16, false, false, true, false, 4, 6, 1>(params, workspace, stream);
  else
    launch_forward<F16, false, true, false, false, 4, 6, 1>(params, workspace, stream);
}

}  // namespace vocabshard::sm90::logits
