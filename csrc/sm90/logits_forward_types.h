// One forward a type of logits, each compiled by itself.
#pragma once

#include <cuda_runtime.h>

namespace vocabshard::logits {

struct ForwardParams;

struct ForwardChoice {
  bool entropy, scaled, aligned;
  bool ring;  // logits_ring.cuh, where there is one for the type
};

void forward_bf16(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream);
void forward_f16(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream);
void forward_f32(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream);

}  // namespace vocabshard::logits
