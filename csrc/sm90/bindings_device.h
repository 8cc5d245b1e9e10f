// What the bindings of the CUDA side share: pointers that come as integers, 0 for none, and the device they live on.
#pragma once

#include <pybind11/pybind11.h>

#include "sm90/check.h"
#include "sm90/dlogits.h"
#include "sm90/sampling_launch.h"

namespace vocabshard::sm90 {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline cudaStream_t as_stream(uintptr_t address) { return reinterpret_cast<cudaStream_t>(address); }

class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~OnDevice() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int device_, before_ = 0;
};

// The truncations of a program.
struct SamplingSteps {
  int32_t count;
  SamplingStep step[kMostSamplingSteps];

  void of(SamplingRows& call) const {
    call.steps = count;
    for (int i = 0; i < count; ++i) call.step[i] = step[i];
  }
};

// Python's Sm90DlogitsKept.
struct DeviceDlogitsKept {
  DlogitsKeptCall call;
  int device;
};

void register_backward(pybind11::module_& module);  // with all of the gradients, and of what is over logits

}  // namespace vocabshard::sm90
