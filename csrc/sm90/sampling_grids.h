// The grids of sampling_stream.h.
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
void launch_grid_of_clusters(void (*kernel)(SamplingStream, Given...), int64_t blocks, int threads, size_t shared,
                             int cluster, cudaStream_t stream, const SamplingStream& call, Given... given) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 0 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, call, given...), "launch of a sampling kernel");
}

template <class... Given>
void launch_grid(void (*kernel)(SamplingStream, Given...), int64_t blocks, int threads, size_t shared,
                 cudaStream_t stream, const SamplingStream& call, Given... given) {
  launch_grid_of_clusters(kernel, blocks, threads, shared, 0, stream, call, given...);
}

void launch_bracket(const SamplingStream& call, cudaStream_t stream);
void launch_collect(const SamplingStream& call, cudaStream_t stream);
void launch_maxima(const SamplingStream& call, cudaStream_t stream);
void launch_list(const SamplingStream& call, cudaStream_t stream);

}  // namespace vocabshard::sm90::sampling
