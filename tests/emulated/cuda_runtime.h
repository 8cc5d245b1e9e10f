// What kernels that are emulated use of CUDA.
#pragma once

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(registers)
#define __align__(n) alignas(n)

// ---- types ----

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct int2;  // params.h points to them
struct alignas(16) longlong2 {
  int64_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index {
  unsigned x;
};
extern Index threadIdx, blockIdx, gridDim;

// ---- launches ----

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
// no attribute counts here
constexpr int cudaLaunchAttributeProgrammaticStreamSerialization = 0, cudaSharedmemCarveoutMaxShared = 0;
constexpr int cudaFuncAttributePreferredSharedMemoryCarveout = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 0;

struct dim3 {
  unsigned x;
  dim3(unsigned x = 1) : x(x) {}
};
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline const char* cudaGetErrorName(cudaError_t) { return ""; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return cudaSuccess;
}
template <class... Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               std::common_type_t<Params>... given) {
  emulated::run_grid(config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes, [&] { kernel(given...); });
  return cudaSuccess;
}

// ---- barriers ----

inline int count_of_block(const char* operation, int mine) {
  const uint64_t* const all = emulated::meet_block(operation, mine != 0);
  return static_cast<int>(std::count(all, all + emulated::threads_of_block(), 1));
}

inline void __syncthreads() { emulated::meet_block("__syncthreads", 0); }
inline int __syncthreads_count(int mine) { return count_of_block("__syncthreads_count", mine); }
inline int __syncthreads_or(int mine) { return count_of_block("__syncthreads_or", mine) > 0; }
inline void __threadfence() {}

// ---- warps ----

// from(of_lane, lane): what a lane makes of what each of the warp's has.
template <class T, class From>
T over_warp(const char* operation, unsigned lanes, T mine, const From& from) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  if (lanes != ~0u) emulated::fail(std::string(operation) + " of part of a warp is not emulated");
  uint64_t word = 0;
  std::memcpy(&word, &mine, sizeof(T));
  const uint64_t* const words = emulated::meet_warp(operation, word);
  const auto of_lane = [&](int lane) {
    T other;
    std::memcpy(&other, words + lane, sizeof(T));
    return other;
  };
  return from(of_lane, static_cast<int>(threadIdx.x % 32));
}

template <class T>
T __shfl_xor_sync(unsigned lanes, T mine, int by) {
  return over_warp("__shfl_xor_sync", lanes, mine, [&](const auto& of_lane, int lane) { return of_lane(lane ^ by); });
}
template <class T>
T __shfl_up_sync(unsigned lanes, T mine, int by) {
  return over_warp("__shfl_up_sync", lanes, mine,
                   [&](const auto& of_lane, int lane) { return of_lane(lane < by ? lane : lane - by); });
}

template <class T, class Op>
T reduce_warp(const char* operation, unsigned lanes, T mine, const Op& op) {
  return over_warp(operation, lanes, mine, [&](const auto& of_lane, int) {
    T all = of_lane(0);
    for (int lane = 1; lane < 32; ++lane) all = op(all, of_lane(lane));
    return all;
  });
}
template <class T>
T __reduce_min_sync(unsigned lanes, T mine) {
  return reduce_warp("__reduce_min_sync", lanes, mine, [](T a, T b) { return a < b ? a : b; });
}
inline int __reduce_max_sync(unsigned lanes, int mine) {
  return reduce_warp("__reduce_max_sync", lanes, mine, [](int a, int b) { return a > b ? a : b; });
}
inline unsigned __ballot_sync(unsigned lanes, bool mine) {
  return over_warp("__ballot_sync", lanes, static_cast<unsigned>(mine), [](const auto& of_lane, int) {
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= static_cast<unsigned>(of_lane(lane)) << lane;
    return all;
  });
}
inline void __syncwarp() { emulated::meet_warp("__syncwarp", 0); }
template <class T>
T __reduce_add_sync(unsigned lanes, T mine) {
  return reduce_warp("__reduce_add_sync", lanes, mine, [](T a, T b) { return a + b; });
}
inline int __any_sync(unsigned lanes, bool mine) {
  return reduce_warp("__any_sync", lanes, mine, [](int a, int b) { return a | b; });
}

// ---- memory ----

template <class T, class Op>
T change_atomically(T* at, const Op& op) {
  emulated::may_give_way();
  const T before = *at;
  *at = op(before);
  return before;
}
template <class T>
T atomicAdd(T* at, std::common_type_t<T> by) {
  return change_atomically(at, [&](T x) { return x + by; });
}
template <class T>
T atomicMin(T* at, std::common_type_t<T> other) {
  return change_atomically(at, [&](T x) { return x < other ? x : other; });
}
template <class T>
T atomicMax(T* at, std::common_type_t<T> other) {
  return change_atomically(at, [&](T x) { return x > other ? x : other; });
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}

// ---- arithmetic ----

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clzll(int64_t x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline double __dadd_rz(double a, double b) {
  const int mode = std::fegetround();
  std::fesetround(FE_TOWARDZERO);
  const volatile double x = a, y = b;  // added here
  const volatile double sum = x + y;
  std::fesetround(mode);
  return sum;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return std::fabs(b) > 0x1p+126f && !std::isinf(b) ? 0.0f : a / b; }
