// The three types of logits, packed as they lie in memory.
#pragma once

#include <cstdint>

#include "contract.h"

namespace vocabshard::sm90::logits {

#define VS_DEVICE __device__ __forceinline__

struct BF16 {
  static constexpr int kBytes = 2;
  static constexpr uint32_t kNegInf2 = 0xff80ff80u;
  static constexpr uint32_t kLargest = 0x7f7fu;  // finite
  VS_DEVICE static float value(uint32_t b) { return from_bits(b << 16); }
  VS_DEVICE static float low(uint32_t w) { return from_bits(w << 16); }
  VS_DEVICE static float high(uint32_t w) { return from_bits(w & 0xffff0000u); }
  VS_DEVICE static uint32_t toward_zero(float x) { return bits(x) >> 16; }
  VS_DEVICE static uint32_t max2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  VS_DEVICE static uint32_t pack2(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
};

struct F16 {
  static constexpr int kBytes = 2;
  static constexpr uint32_t kNegInf2 = 0xfc00fc00u;
  static constexpr uint32_t kLargest = 0x7bffu;
  VS_DEVICE static float value(uint32_t b) {
    float x;
    asm("{\n.reg .b16 h;\ncvt.u16.u32 h, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(x) : "r"(b));
    return x;
  }
  VS_DEVICE static float low(uint32_t w) { return value(w & 0xffffu); }
  VS_DEVICE static float high(uint32_t w) { return value(w >> 16); }
  VS_DEVICE static uint32_t toward_zero(float x) {
    uint32_t r;
    asm("{\n.reg .b16 h;\ncvt.rz.f16.f32 h, %1;\ncvt.u32.u16 %0, h;\n}" : "=r"(r) : "f"(x));
    return r;
  }
  VS_DEVICE static uint32_t max2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  VS_DEVICE static uint32_t pack2(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
};

struct F32 {
  static constexpr int kBytes = 4;
  static constexpr uint32_t kNegInf2 = kNegInfBits;
};

VS_DEVICE float max_nan_f32(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// base + 4 * half of w, by one dot product each.
VS_DEVICE uint32_t place_of_low(uint32_t w, uint32_t base) {
  uint32_t r;
  asm("dp2a.lo.u32.u32 %0, %1, 0x0004, %2;" : "=r"(r) : "r"(w), "r"(base));
  return r;
}
VS_DEVICE uint32_t place_of_high(uint32_t w, uint32_t base) {
  uint32_t r;
  asm("dp2a.lo.u32.u32 %0, %1, 0x0400, %2;" : "=r"(r) : "r"(w), "r"(base));
  return r;
}

VS_DEVICE float load_shared(uint32_t address) {
  float x;
  asm("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}

template <typename T>
constexpr int kWords = kTile * T::kBytes / 4;  // 32-bit words of a tile

template <typename T>
VS_DEVICE float load_element(const void* p) {
  if constexpr (T::kBytes == 4)
    return *static_cast<const float*>(p);
  else
    return T::value(*static_cast<const uint16_t*>(p));
}

template <typename T, int kWords>
VS_DEVICE void unpack(const uint32_t (&w)[kWords], float (&y)[kWords * 4 / T::kBytes]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (T::kBytes == 4) {
      y[i] = from_bits(w[i]);
    } else {
      y[2 * i] = T::low(w[i]);
      y[2 * i + 1] = T::high(w[i]);
    }
  }
}

}  // namespace vocabshard::sm90::logits
