#include "sm90/product_launch.cuh"

namespace vocabshard::sm90 {

void launch_product_bf16(const ProductCall& call, int32_t multiprocessors, cudaStream_t stream) {
  launch_product_element<__nv_bfloat16>(call, multiprocessors, stream);
}

}  // namespace vocabshard::sm90
