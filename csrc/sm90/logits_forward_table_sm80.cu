#include "sm90/logits_forward.cuh"
#include "sm90/logits_forward_types.h"

namespace vocabshard::sm90::logits {

void forward_bf16_table(const ForwardParams& params, const ForwardChoice& choice, void* workspace,
                        cudaStream_t stream) {
  if (choice.scaled && choice.aligned)
    launch_forward<BF16, false, true, true, true, 20, 1, 2>(params, workspace, stream);
  else if (choice.scaled)
    launch_forward<BF16, false, true, false, true, 24, 1, 1>(params, workspace, stream);
  else if (choice.aligned)
    launch_forward<BF16, false, false, true, true, 20, 1, 2>(params, workspace, stream);
  else
    launch_forward<BF16, false, false, false, true, 24, 1, 1>(params, workspace, stream);
}

}  // namespace vocabshard::sm90::logits
