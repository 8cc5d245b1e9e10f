// wgmma of the gradients' products: D[64, n] += A[64, 16] * B[16, n] from shared memory, fp32 accumulators.
//
// B lies across k: a line of 128 bytes is 64 columns at one k. So does A where it is transposed.
#pragma once

#include "sm90/wgmma.h"

namespace vocabshard::sm90 {

// Lines across k, 128-byte swizzle: 64 lines of k are 8 KiB, the next 64 rows or columns lie behind them (512 in units
// of 16 bytes). Next 16 elements of k: + 128.
VS_DEVICE uint64_t descriptor_across(uint32_t shared_address) {
  return (1ull << 62) | (64ull << 32) | (512ull << 16) | ((shared_address & 0x3ffffu) >> 4);
}

template <class Element, bool kTransposedA, int kColumns>
struct ProductMma;

#define VS_PRODUCT_MMA(Element, TYPE)                                                                  \
  template <bool kTransposedA>                                                                         \
  struct ProductMma<Element, kTransposedA, 128> {                                                      \
    static VS_DEVICE void run(float (&d)[64], uint64_t a, uint64_t b) {                                \
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                        \
                   " {"                                                                                \
                   "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
                   "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
                   "%64, %65, 1, 1, 1, %66, 1;"                                                        \
                   : VS_F16(d, 0), VS_F16(d, 16), VS_F16(d, 32), VS_F16(d, 48)                         \
                   : "l"(a), "l"(b), "n"(kTransposedA ? 1 : 0));                                       \
    }                                                                                                  \
  };
VS_PRODUCT_MMA(__nv_bfloat16, "bf16")
VS_PRODUCT_MMA(__half, "f16")

// D[64, 64], A along k.
#define VS_PRODUCT_MMA_NARROW(Element, TYPE)                                                           \
  template <>                                                                                          \
  struct ProductMma<Element, false, 64> {                                                              \
    static VS_DEVICE void run(float (&d)[32], uint64_t a, uint64_t b) {                                \
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                         \
                   " {"                                                                                \
                   "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
                   "%32, %33, 1, 1, 1, 0, 1;"                                                          \
                   : VS_F16(d, 0), VS_F16(d, 16)                                                       \
                   : "l"(a), "l"(b));                                                                  \
    }                                                                                                  \
  };
VS_PRODUCT_MMA_NARROW(__nv_bfloat16, "bf16")
VS_PRODUCT_MMA_NARROW(__half, "f16")

// D[64, 256], A along k.
template <class Element>
struct ProductMmaWide;

#define VS_PRODUCT_MMA_WIDE(Element, TYPE)                                                                             \
  template <>                                                                                                          \
  struct ProductMmaWide<Element> {                                                                                     \
    static VS_DEVICE void run(float (&d)[128], uint64_t a, uint64_t b) {                                               \
      asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                                        \
                   " {"                                                                                                \
                   "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                            \
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
                   "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                  \
                   "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
                   "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
                   "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
                   "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
                   "%128, %129, 1, 1, 1, 0, 1;"                                                                        \
                   : VS_F16(d, 0), VS_F16(d, 16), VS_F16(d, 32), VS_F16(d, 48), VS_F16(d, 64), VS_F16(d, 80),          \
                     VS_F16(d, 96), VS_F16(d, 112)                                                                     \
                   : "l"(a), "l"(b));                                                                                  \
    }                                                                                                                  \
  };
VS_PRODUCT_MMA_WIDE(__nv_bfloat16, "bf16")
VS_PRODUCT_MMA_WIDE(__half, "f16")

}  // namespace vocabshard::sm90
