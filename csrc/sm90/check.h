// CUDA's errors as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace vocabshard::sm90 {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

// Does something once a device: a launch has better things to do.
class OncePerDevice {
 public:
  template <class Action>
  void operator()(const Action& action) {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if ((done_.load(std::memory_order_acquire) & bit) != 0) return;
    action();
    done_.fetch_or(bit, std::memory_order_release);
  }

 private:
  std::atomic<uint64_t> done_{0};
};

// Launches a kernel that calls grid_wait before it touches what the grid before it writes: it may be set up while that
// runs.
template <class... Params, class... Given>
void launch_behind_shared(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                          const Given&... given) {
  cudaLaunchAttribute behind = {};
  behind.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  behind.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &behind;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(given)...), "launch");
}

template <class... Params, class... Given>
void launch_behind(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream, const Given&... given) {
  launch_behind_shared(kernel, blocks, threads, 0, stream, given...);
}

inline void check_launch(const char* what) { check(cudaGetLastError(), what); }

}  // namespace vocabshard::sm90
