// The three grids of sampling_stream.h.
#pragma once

#include "sm90/check.h"
#include "sm90/sampling_stream.h"

namespace vocabshard::sm90::sampling {

// How CTAs share a row: so many columns each, a multiple of `granule`. `slots`: CTAs that run at once.
struct Parts {
  int32_t columns, count;
};
Parts parts_of(int64_t rows, int64_t valid, int64_t granule, int64_t slots);

// Each waits for the one before it in grid_wait, and may be set up earlier.
template <class... Given>
void launch_grid(void (*kernel)(SamplingStream, Given...), int64_t blocks, int threads, size_t shared,
                 cudaStream_t stream, const SamplingStream& call, Given... given) {
  cudaLaunchAttribute behind = {};
  behind.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  behind.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &behind;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, call, given...), "launch of a sampling kernel");
}

void launch_bracket(const SamplingStream& call, cudaStream_t stream);
void launch_collect(const SamplingStream& call, cudaStream_t stream);
void launch_race(const SamplingStream& call, cudaStream_t stream);

}  // namespace vocabshard::sm90::sampling
