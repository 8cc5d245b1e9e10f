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
void launch_maxima(const SamplingStream& call, cudaStream_t stream);
void launch_list(const SamplingStream& call, cudaStream_t stream);
void launch_bracket(const SamplingStream& call, cudaStream_t stream);
// Instead of launch_bracket beside a forward that leaves rows unmerged, by a schedule that gives it the time.
bool has_time(const Schedule& schedule);
void launch_count(const SamplingStream& call, cudaStream_t stream);
void launch_collect(const SamplingStream& call, cudaStream_t stream);

}  // namespace vocabshard::sm90::sampling
