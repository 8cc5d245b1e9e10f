#include "sm90/logits_forward_types.h"
#include "sm90/logits_launch.cuh"

namespace vocabshard::logits {

void forward_bf16(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream) {
  constexpr int W = kWarpsOfBlock, B = kBlocksOfMultiprocessor;
  if (choice.entropy)
    launch_forward<BF16, true, true, false, 0, W, 1, 4>(params, workspace, stream);
  else if (choice.scaled && choice.aligned)
    launch_forward<BF16, false, true, true, 0, W, 1, B>(params, workspace, stream);
  else if (choice.scaled)
    launch_forward<BF16, false, true, false, 0, W, 1, 6>(params, workspace, stream);
  else if (choice.aligned)
    launch_forward<BF16, false, false, true, 0, W, 1, B>(params, workspace, stream);
  else
    launch_forward<BF16, false, false, false, 0, W, 1, 6>(params, workspace, stream);
}

}  // namespace vocabshard::logits
