#include "sm90/dlogits.cuh"

namespace vocabshard::sm90 {

void launch_dlogits_bf16(const DlogitsParams& p, DlogitsKind kind, int32_t clusters, cudaStream_t stream) {
  if (kind == kPlainDlogits)
    launch_dlogits_one<__nv_bfloat16, kPlainDlogits>(p, clusters, stream);
  else if (kind == kScaledDlogits)
    launch_dlogits_one<__nv_bfloat16, kScaledDlogits>(p, clusters, stream);
  else
    launch_dlogits_one<__nv_bfloat16, kCappedDlogits>(p, clusters, stream);
}

}  // namespace vocabshard::sm90
