#include "sm90/dlogits.cuh"

namespace vocabshard::sm90 {

void launch_dlogits_bf16(const DlogitsParams& p, bool plain, int32_t clusters, cudaStream_t stream) {
  plain ? launch_dlogits_one<__nv_bfloat16, true>(p, clusters, stream)
        : launch_dlogits_one<__nv_bfloat16, false>(p, clusters, stream);
}

}  // namespace vocabshard::sm90
