#include "sm90/logits_forward_types.h"
#include "sm90/logits_launch.cuh"

namespace vocabshard::logits {

// Twice the bytes a logit: a multiplication by 1 costs nothing that shows.
void forward_f32(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream) {
  constexpr int W = kWarpsOfBlock;
  if (choice.entropy)
    launch_forward<F32, true, true, false, 0, W, 1, 4>(params, workspace, stream);
  else if (choice.aligned)
    launch_forward<F32, false, true, true, 0, W, 1, 6>(params, workspace, stream);
  else
    launch_forward<F32, false, true, false, 0, W, 1, 5>(params, workspace, stream);
}

}  // namespace vocabshard::logits
