#include "sm90/logits_forward_types.h"
#include "sm90/logits_launch.cuh"

namespace vocabshard::logits {

void forward_f16(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream) {
  if (choice.entropy)
    launch_forward<F16, true, true, false, 4, 4>(params, workspace, stream);
  else if (choice.ring && choice.aligned)
    launch_ring<F16, true, true, 8, 16, 2>(params, workspace, stream);
  else if (choice.ring)
    launch_ring<F16, true, false, 8, 16, 2>(params, workspace, stream);
  else if (choice.aligned)
    launch_forward<F16, false, true, true, 4, 8>(params, workspace, stream);
  else
    launch_forward<F16, false, true, false, 4, 6>(params, workspace, stream);
}

}  // namespace vocabshard::logits
