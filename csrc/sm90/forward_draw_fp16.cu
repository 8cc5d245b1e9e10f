#include "sm90/forward_wgmma.cuh"

namespace vocabshard::sm90 {

void launch_draw_fp16(const WgmmaParams& p, cudaStream_t stream) {
  launch_one<__half, false, true, kShape64.m_blocks, kShape64.groups>(p, stream);
}

}  // namespace vocabshard::sm90
