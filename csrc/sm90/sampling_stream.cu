// What decides whether rows are streamed (sampling_stream.h), and how grids share them.
#include <algorithm>

#include "sm90/launch.h"
#include "sm90/sampling_grids.h"
#include "sm90/sampling_race.cuh"

namespace vocabshard::sm90 {

namespace sampling {

constexpr double kOverhead = 0.08;  // of a CTA, in units of a whole row by one

Parts parts_of(int64_t rows, int64_t valid, int64_t granule, int64_t slots) {
  const int64_t granules = (valid + granule - 1) / granule;
  int64_t most = 1;
  double least = 1e30;
  for (int64_t parts = 1; parts <= std::min<int64_t>(kMostParts, granules); ++parts) {
    const int64_t waves = (rows * parts + slots - 1) / slots;
    const double time = static_cast<double>(waves) * (1.0 / static_cast<double>(parts) + kOverhead);
    if (time < least) least = time, most = parts;
  }
  const int64_t each = (granules + most - 1) / most;
  return {static_cast<int32_t>(each * granule), static_cast<int32_t>((granules + each - 1) / each)};
}

}  // namespace sampling

int64_t sampling_stream_row_bytes() { return sampling::kRowBytes; }

bool streams_rows(const SamplingRows& call) {
  const bool vectors = reinterpret_cast<uintptr_t>(call.logits) % 16 == 0 && call.row_stride % 4 == 0;
  if (!call.whole || !vectors || call.vocab_start % 4 != 0 || call.given_cut != nullptr || call.best_count > 0 ||
      call.cut == nullptr || call.place != nullptr || call.maxima != nullptr || call.records == nullptr ||
      call.records_there || call.valid < 1 || call.valid > kStreamedColumns ||
      call.vocab_start + call.valid > kEveryTie)
    return false;
  bool few = false;  // kept
  for (int k = 0; k < call.steps; ++k) {
    const SamplingStep& step = call.step[k];
    if (step.kind == kGreedy || (!step.scaled && (call.scales != nullptr || call.scale != 1.0f))) return false;
    if (step.kind == kTopK) {
      if (!few && step.number > kStreamedK) return false;
      few = true;
    }
    if (step.kind == kTopP && !few) return call.steps == 1;
  }
  return few;
}

namespace {
// Alone; of those behind a top_k little is left.
bool is_top_p(const SamplingRows& call) { return call.steps == 1 && call.step[0].kind == kTopP; }
}  // namespace

GroupMaxima sampling_stream_maxima(const SamplingRows& call, void* workspace) {
  const sampling::Workspace work(workspace, call.rows);
  return {work.maxima, sampling::kRowMaxima, work.words, is_top_p(call) ? work.word_count(call.rows) : kForwardWords};
}

bool streams_beside(const SamplingRows& call, const Schedule& schedule) {
  return streams_rows(call) &&
         (!is_top_p(call) || (call.rows <= std::min<int64_t>(multiprocessor_count(), sampling::kMostStates) &&
                              sampling::has_time(schedule)));
}

void launch_sampling_stream(const SamplingStream& call, cudaStream_t stream) {
  if (call.rows.rows == 0) return;
  if (is_top_p(call.rows)) {
    call.unmerged.partials != nullptr ? sampling::launch_count(call, stream) : sampling::launch_bracket(call, stream);
    sampling::launch_collect(call, stream);
  } else {
    if (!call.maxima_there) sampling::launch_maxima(call, stream);
    sampling::launch_list(call, stream);
  }
}

}  // namespace vocabshard::sm90
