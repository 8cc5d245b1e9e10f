#include "sm90/logits_forward_types.h"
#include "sm90/logits_launch.cuh"

namespace vocabshard::logits {

void forward_f32(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream) {
  if (choice.entropy)
    launch_forward<F32, true, true, false, 4, 4>(params, workspace, stream);
  else if (choice.aligned)
    launch_forward<F32, false, true, true, 4, 6>(params, workspace, stream);
  else
    launch_forward<F32, false, true, false, 4, 5>(params, workspace, stream);
}

}  // namespace vocabshard::logits
