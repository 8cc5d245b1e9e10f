#include "sm90/forward_wgmma.cuh"

namespace vocabshard::sm90 {

void launch_wgmma_fp16(const WgmmaParams& p, int32_t path, bool entropy, cudaStream_t stream) {
  launch_element<__half>(p, path, entropy, stream);
}

}  // namespace vocabshard::sm90
