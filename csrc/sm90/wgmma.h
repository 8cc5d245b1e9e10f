// wgmma: D[64, n] += A[64, 16] * B[n, 16]^T from shared memory, fp32 accumulators in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sm90/ptx.h"

namespace vocabshard::sm90 {

// K-major tiles of 64 elements a row, 128-byte swizzle: 8 rows are 1024 bytes (stride 64 in units of 16 bytes).
// `further` in units of 16 bytes: next 16 elements of k: 2, next 64 rows: 512.
VS_DEVICE uint64_t wgmma_descriptor(uint32_t shared_address, uint32_t further = 0) {
  return (1ull << 62) | (64ull << 32) | (((shared_address & 0x3ffffu) >> 4) + (1u << 16) + further);
}

#define VS_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define VS_F16(d, i) VS_F4(d, i), VS_F4(d, i + 4), VS_F4(d, i + 8), VS_F4(d, i + 12)

// accumulate = 0: D starts from zero.
template <class Element, int kColumns>
struct Wgmma;

#define VS_WGMMA_192(Element, TYPE)                                                                 \
  template <>                                                                                       \
  struct Wgmma<Element, 192> {                                                                      \
    static VS_DEVICE void run(float (&d)[96], uint64_t a, uint64_t b, int32_t accumulate) {         \
      asm volatile(                                                                                 \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                              \
          "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE                              \
          " {"                                                                                      \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "        \
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "        \
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "        \
          "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "        \
          "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "       \
          "%96, %97, p, 1, 1, 0, 0;\n}"                                                             \
          : VS_F16(d, 0), VS_F16(d, 16), VS_F16(d, 32), VS_F16(d, 48), VS_F16(d, 64), VS_F16(d, 80) \
          : "l"(a), "l"(b), "r"(accumulate));                                                       \
    }                                                                                               \
  };
VS_WGMMA_192(__nv_bfloat16, "bf16")
VS_WGMMA_192(__half, "f16")

#define VS_WGMMA_256(Element, TYPE)                                                                                 \
  template <>                                                                                                       \
  struct Wgmma<Element, 256> {                                                                                      \
    static VS_DEVICE void run(float (&d)[128], uint64_t a, uint64_t b, int32_t accumulate) {                        \
      asm volatile(                                                                                                 \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                             \
          "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                                              \
          " {"                                                                                                      \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                  \
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                        \
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                        \
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                        \
          "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                        \
          "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                        \
          "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "            \
          "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "       \
          "%128, %129, p, 1, 1, 0, 0;\n}"                                                                           \
          : VS_F16(d, 0), VS_F16(d, 16), VS_F16(d, 32), VS_F16(d, 48), VS_F16(d, 64), VS_F16(d, 80), VS_F16(d, 96), \
            VS_F16(d, 112)                                                                                          \
          : "l"(a), "l"(b), "r"(accumulate));                                                                       \
    }                                                                                                               \
  };
VS_WGMMA_256(__nv_bfloat16, "bf16")
VS_WGMMA_256(__half, "f16")

}  // namespace vocabshard::sm90
