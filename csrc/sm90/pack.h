// Two values rounded to 16 bits each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "contract.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

template <class Element>
VS_DEVICE uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace vocabshard::sm90
