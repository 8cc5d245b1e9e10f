// Host side of the product kernels.
#pragma once

#include <cuda_runtime.h>

#include "sm90/product.h"

namespace vocabshard::sm90 {

// One translation unit an element type: they take long to compile.
void launch_product_bf16(const ProductCall& call, int32_t multiprocessors, cudaStream_t stream);
void launch_product_fp16(const ProductCall& call, int32_t multiprocessors, cudaStream_t stream);

}  // namespace vocabshard::sm90
