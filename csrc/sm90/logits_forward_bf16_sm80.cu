#include "sm90/logits_forward_types.h"
#include "sm90/logits_launch.cuh"

namespace vocabshard::logits {

void forward_bf16(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream) {
  constexpr int W = kWorkersOfRing;
  if (choice.entropy)
    launch_forward<BF16, true, true, false, 4, 4>(params, workspace, stream);
  else if (choice.ring && !choice.aligned)
    launch_ring<BF16, true, false, 6, 24, 3>(params, workspace, stream);
  else if (choice.ring && choice.scaled)
    launch_ring<BF16, true, true, 8, W, 3>(params, workspace, stream);
  else if (choice.ring)
    launch_ring<BF16, false, true, 8, W, 3>(params, workspace, stream);
  else if (choice.aligned)
    launch_forward<BF16, false, true, true, 4, 8>(params, workspace, stream);
  else
    launch_forward<BF16, false, true, false, 4, 6>(params, workspace, stream);
}

}  // namespace vocabshard::logits
