// The launch of one forward kernel: how many blocks, and where its workspace lies.
#pragma once

#include "sm90/check.h"
#include "sm90/logits_forward.cuh"

namespace vocabshard::logits {

constexpr int kWarpsOfBlock = 4, kBlocksOfMultiprocessor = 8;

inline int multiprocessors() {
  constexpr int kDevices = 64;
  static int known[kDevices];  // a racing write puts the same number
  int device = 0;
  sm90::check(cudaGetDevice(&device), "cudaGetDevice");
  int count = device < kDevices ? known[device] : 0;
  if (count == 0) {
    sm90::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
    if (device < kDevices) known[device] = count;
  }
  return count;
}

// Groups that share rows of a launch are at most this many.
inline int64_t most_groups() { return static_cast<int64_t>(multiprocessors()) * 32; }

template <typename T, bool kEntropy, bool kScaled, bool kAligned, int kLookups, int kWarps, int kGroups, int kBlocks>
void launch_forward(ForwardParams params, void* workspace, cudaStream_t stream) {
  params.tiles = static_cast<uint32_t>((params.valid + kTile - 1) / kTile);
  params.steps = max(1u, (params.tiles + 32 * kWarps - 1) / (32 * kWarps));
  const int64_t total = params.outputs * params.steps;
  const int64_t groups = min(total, static_cast<int64_t>(multiprocessors()) * kBlocks * kGroups);
  params.arrivals = static_cast<uint32_t*>(workspace);
  params.shared = reinterpret_cast<int64_t*>(params.arrivals + most_groups());
  const auto kernel = forward_kernel<T, kEntropy, kScaled, kAligned, kLookups, kWarps, kGroups, kBlocks>;
  int shared_bytes = 0;
  if constexpr (kLookups > 0) {
    shared_bytes = Table<T>::kBytes;
    sm90::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                "shared memory of the forward over logits");
  }
  const unsigned blocks = static_cast<unsigned>((groups + kGroups - 1) / kGroups);
  kernel<<<blocks, 32 * kWarps * kGroups, shared_bytes, stream>>>(params);
  sm90::check_launch("forward over logits");
}

}  // namespace vocabshard::logits
