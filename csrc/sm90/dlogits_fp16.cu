#include "sm90/dlogits.cuh"

namespace vocabshard::sm90 {

void launch_dlogits_fp16(const DlogitsParams& p, bool plain, int32_t clusters, cudaStream_t stream) {
  plain ? launch_dlogits_one<__half, true>(p, clusters, stream)
        : launch_dlogits_one<__half, false>(p, clusters, stream);
}

}  // namespace vocabshard::sm90
