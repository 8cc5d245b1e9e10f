// One forward a type of logits, each compiled by itself.
#pragma once

#include <cuda_runtime.h>

namespace vocabshard::sm90::logits {

struct ForwardParams;

struct ForwardChoice {
  bool entropy, scaled, aligned;
  bool table;  // half of the exponentials by table
};

void forward_bf16(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream);
void forward_bf16_table(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream);
// Compute capability 9.0.
void forward_bf16_ring(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream);
void forward_f16(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream);
void forward_f32(const ForwardParams& params, const ForwardChoice& choice, void* workspace, cudaStream_t stream);

}  // namespace vocabshard::sm90::logits
