#include "sm90/product_launch.cuh"

namespace vocabshard::sm90 {

void launch_product_fp16(const ProductCall& call, int32_t multiprocessors, cudaStream_t stream) {
  launch_product_element<__half>(call, multiprocessors, stream);
}

}  // namespace vocabshard::sm90
