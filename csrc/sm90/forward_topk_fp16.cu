#include "sm90/forward_wgmma.cuh"

namespace vocabshard::sm90 {

void launch_topk_fp16(const WgmmaParams& p, cudaStream_t stream) {
  launch_one<__half, false, false, kShape128.m_blocks, kShape128.groups, true>(p, stream);
}

}  // namespace vocabshard::sm90
