// The launches of the forward kernels: how many workers, and where the workspace lies.
#pragma once

#include "sm90/check.h"
#include "sm90/logits_forward.cuh"
#include "sm90/logits_ring.cuh"

namespace vocabshard::logits {

struct Device {
  int multiprocessors, shared_bytes;  // shared memory that a block may have
};

inline Device current_device() {
  constexpr int kDevices = 64;
  static Device known[kDevices];  // a racing write puts the same numbers
  int index = 0;
  sm90::check(cudaGetDevice(&index), "cudaGetDevice");
  if (index < kDevices && known[index].multiprocessors != 0) return known[index];
  Device device = {};
  sm90::check(cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
              "shared memory of a block");
  sm90::check(cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index),
              "multiprocessor count");
  if (index < kDevices) known[index] = device;
  return device;
}

inline int multiprocessors() { return current_device().multiprocessors; }

constexpr int kMostWorkers = 32;              // of a multiprocessor
constexpr int kWorkersOfRing = 28;            // warps of a block of the ring, bf16
constexpr int64_t kRingElements = 1ll << 24;  // fewer do not repay filling the table
constexpr int64_t kRingColumns = 4096;        // nor do rows of a few steps repay a warp of their own

// Of a GPU whose blocks have as much shared memory as Hopper's.
inline bool has_ring_memory() { return current_device().shared_bytes >= 227 * 1024; }

inline int64_t most_workers() { return static_cast<int64_t>(multiprocessors()) * kMostWorkers; }

// tiles: columns of a step, in tiles.
inline void deal(ForwardParams& params, int64_t tiles, int workers_of_multiprocessor, void* workspace) {
  const int64_t of_row = (params.valid + kTile - 1) / kTile;
  params.steps = static_cast<uint32_t>(max(static_cast<int64_t>(1), (of_row + tiles - 1) / tiles));
  params.workers = static_cast<uint32_t>(
      min(params.outputs * params.steps, static_cast<int64_t>(multiprocessors()) * workers_of_multiprocessor));
  params.arrivals = static_cast<uint32_t*>(workspace);
  params.shared = reinterpret_cast<int64_t*>(params.arrivals + most_workers());
}

template <typename T, bool kEntropy, bool kScaled, bool kAligned, int kWarps, int kBlocks>
void launch_forward(ForwardParams params, void* workspace, cudaStream_t stream) {
  static_assert(kBlocks <= kMostWorkers, "workspace");
  deal(params, 32 * kWarps, kBlocks, workspace);
  forward_kernel<T, kEntropy, kScaled, kAligned, kWarps, kBlocks><<<params.workers, 32 * kWarps, 0, stream>>>(params);
  sm90::check_launch("forward over logits");
}

template <typename T, bool kScaled, bool kAligned, int kLookups, int kWarps, int kStages>
void launch_ring(ForwardParams params, void* workspace, cudaStream_t stream) {
  static_assert(kWarps <= kMostWorkers, "workspace");
  deal(params, 32, kWarps, workspace);
  RingParams ring = {params, 0, 0, 0};
  const int64_t whole = params.valid / kTile;
  ring.full_steps = static_cast<uint32_t>(whole / 32);
  ring.tail_tiles = static_cast<uint32_t>(whole % 32);
  ring.tail_columns = static_cast<uint32_t>(params.valid % kTile);
  const auto kernel = ring_kernel<T, kScaled, kAligned, kLookups, kWarps, kStages>;
  constexpr int kShared = RingLayout<T, kAligned, kWarps, kStages>::kBytes;
  sm90::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
              "shared memory of the forward over logits");
  kernel<<<(params.workers + kWarps - 1) / kWarps, 32 * kWarps, kShared, stream>>>(ring);
  sm90::check_launch("forward over logits");
}

}  // namespace vocabshard::logits
