// Host side of the wgmma kernels.
#pragma once

#include <cuda_runtime.h>

#include "sm90/launch.h"
#include "sm90/params.h"

namespace vocabshard::sm90 {

constexpr WgmmaShape kShape128 = {2, 3}, kShape64 = {1, 3};
constexpr WgmmaShape wgmma_shape(int32_t path) { return path == kRows64 ? kShape64 : kShape128; }

// One translation unit an element type: they take long to compile.
void launch_wgmma_bf16(const WgmmaParams& p, int32_t path, bool entropy, cudaStream_t stream);
void launch_wgmma_fp16(const WgmmaParams& p, int32_t path, bool entropy, cudaStream_t stream);

// The same of at most 64 rows, with p.draw.
void launch_draw_bf16(const WgmmaParams& p, cudaStream_t stream);
void launch_draw_fp16(const WgmmaParams& p, cudaStream_t stream);

// 128 rows a block, with p.top.
void launch_topk_bf16(const WgmmaParams& p, cudaStream_t stream);
void launch_topk_fp16(const WgmmaParams& p, cudaStream_t stream);

inline void launch_wgmma(const WgmmaParams& p, int32_t path, bool half_precision, bool entropy, cudaStream_t stream) {
  half_precision ? launch_wgmma_fp16(p, path, entropy, stream) : launch_wgmma_bf16(p, path, entropy, stream);
}

}  // namespace vocabshard::sm90
