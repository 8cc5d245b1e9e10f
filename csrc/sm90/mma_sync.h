// A warp's product D[16, 8] += A[16, 16] * B[16, 8]: the step of the chain that wgmma makes, with its bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "sm90/ptx.h"

namespace vocabshard::sm90 {

template <class Element>
VS_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#define VS_MMA(Element, TYPE)                                                                  \
  template <>                                                                                  \
  VS_DEVICE void mma<Element>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                        \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"        \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));          \
  }
VS_MMA(__nv_bfloat16, "bf16")
VS_MMA(__half, "f16")
#undef VS_MMA

}  // namespace vocabshard::sm90
