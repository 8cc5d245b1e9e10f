#include "sm90/dlogits.cuh"

namespace vocabshard::sm90 {

void launch_dlogits_fp16(const DlogitsParams& p, DlogitsKind kind, DlogitsLaunch launch, cudaStream_t stream) {
  if (kind == kPlainDlogits)
    launch_dlogits_one<__half, kPlainDlogits>(p, launch, stream);
  else if (kind == kScaledDlogits)
    launch_dlogits_one<__half, kScaledDlogits>(p, launch, stream);
  else
    launch_dlogits_one<__half, kCappedDlogits>(p, launch, stream);
}

}  // namespace vocabshard::sm90
