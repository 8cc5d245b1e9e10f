// CUDA's errors as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace vocabshard::sm90 {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

inline void check_launch(const char* what) { check(cudaGetLastError(), what); }

}  // namespace vocabshard::sm90
