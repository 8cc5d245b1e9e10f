// The kernels that read by plain loads: mma.sync for any shape in bf16 and fp16, an FMA chain for fp32.
#pragma once

#include <cuda_runtime.h>

namespace vocabshard::sm90 {

struct PlainParams;

struct PlainShape {
  int rows, columns;  // of one CTA's tile
};

PlainShape mma_shape();
PlainShape fma_shape();
constexpr int kPlainSplitsPerCta = 2;  // records a CTA writes for a row

// `splits` CTAs share a block of rows. The launch error, if any, stays for cudaGetLastError.
void launch_mma(const PlainParams& p, bool half_precision, int splits, bool entropy, cudaStream_t stream);
void launch_fma(const PlainParams& p, int splits, bool entropy, cudaStream_t stream);

}  // namespace vocabshard::sm90
