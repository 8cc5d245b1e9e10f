// In the place of csrc/sm90/ptx.h: what it has for kernels that are emulated.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cmath>

#define VS_DEVICE __device__ __forceinline__

namespace vocabshard::sm90::ptx {

VS_DEVICE void grid_launch_next() {}
VS_DEVICE void grid_wait() { emulated::grid_wait(); }

VS_DEVICE uint32_t add_in_turn(uint32_t* at, uint32_t by) { return atomicAdd(at, by); }
// Other blocks do not run meanwhile, but the grid before may.
VS_DEVICE int32_t load_acquire(const int32_t* at) {
  if (emulated::run.acquires) emulated::run.acquires(at);
  return *at;
}
VS_DEVICE void store_release(int32_t* at, int32_t x) { *at = x; }
VS_DEVICE void pause(uint32_t) { emulated::give_way(); }

VS_DEVICE float max_nan(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::nanf("");
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}

// As far off as it may be on a GPU, where threads are shuffled.
VS_DEVICE float exp2(float x) {
  const bool off = emulated::run.order == emulated::Order::kShuffled;
  const float error = off ? (static_cast<float>(emulated::random_word() >> 40) * 0x1p-23f - 1.0f) * 0x1p-22f : 0.0f;
  const float y = std::exp2(x) * (1.0f + error);
  return y < 0x1p-126f ? 0.0f : y;
}

VS_DEVICE void add_if(bool wanted, uint32_t& to, uint32_t by) { to += wanted ? by : 0; }

VS_DEVICE float sqrt(float x) { return std::sqrt(x); }

VS_DEVICE bool is_infinite(float x) { return std::isinf(x); }

}  // namespace vocabshard::sm90::ptx
