#include "sm90/logits_forward_types.h"
#include "sm90/logits_ring.cuh"

namespace vocabshard::sm90::logits {

namespace {

constexpr int kWarps = 24, kStages = 2;

template <bool kScaled>
void launch_ring(ForwardParams forward, void* workspace, cudaStream_t stream) {
  RingParams params = {};
  forward.steps = (static_cast<uint32_t>(forward.valid) + kRingColumns - 1) / kRingColumns;
  const uint32_t most = static_cast<uint32_t>(multiprocessors()) * kWarps;
  params.lots =
      deal_lots(static_cast<uint32_t>(forward.outputs), forward.steps, most, static_cast<uint32_t>(most_parts()));
  forward.workers = min(most, params.lots.count);
  params.forward = forward;
  params.next = static_cast<uint32_t*>(workspace) + most_workers();
  params.arrivals = params.next + 2;
  params.shared = reinterpret_cast<int64_t*>(params.arrivals + most_parts());
  const auto kernel = ring_kernel<kScaled, kWarps, kStages>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Table::kBytes),
        "shared memory of the forward over logits");
  kernel<<<(forward.workers + kWarps - 1) / kWarps, 32 * kWarps, Table::kBytes, stream>>>(params);
  check_launch("forward over logits");
}

}  // namespace

void forward_bf16_ring(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream) {
  if (choice.scaled)
    launch_ring<true>(params, workspace, stream);
  else
    launch_ring<false>(params, workspace, stream);
}

}  // namespace vocabshard::sm90::logits
