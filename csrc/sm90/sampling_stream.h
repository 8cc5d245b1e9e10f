// Cut, token and truncated record of whole rows for the usual programs, by grids over all multiprocessors
// (docs/operators/sampling.md): a top_k of few by a CTA a row that lists the best columns; a top_p by CTAs beside the
// forward that writes the logits, or by two grids, one behind the other. The bytes are those of launch_sampling_rows.
#pragma once

#include "sm90/launch.h"
#include "sm90/sampling_launch.h"

namespace vocabshard::sm90 {

constexpr int64_t kStreamedColumns = 1 << 18;    // a row may have: masses of so many fit into 32 bits a piece
constexpr int64_t kStreamedK = 256;              // of a top_k
constexpr int64_t kMostStreamBytes = 128 << 20;  // of workspace

struct SamplingStream {
  SamplingRows rows;  // whole ones; cut, records, and drawn where it draws, are there
  int64_t* uncut;     // [4, rows]: records of all columns, of any target; not read where rows are left unmerged
  UnmergedRows unmerged;
  void* workspace;    // sampling_stream_row_bytes() for each row, aligned to 128
  bool maxima_there;  // those of sampling_stream_maxima; of unmerged rows only where streams_beside
  bool folds;         // rows at once, as of a group of one, with drawn tokens for targets
  FoldRows fold;      // for then
};

// Where in a workspace the maxima of groups are looked for; a launch makes them where they are not there.
GroupMaxima sampling_stream_maxima(const SamplingRows& call, void* workspace);

// Whether such rows are taken with maxima, of a forward of this schedule that leaves them unmerged.
bool streams_beside(const SamplingRows& call, const Schedule& schedule);

// Whether these rows can be taken: columns that vectors can read, one top_p, or a top_k before any top_p, and min_p.
bool streams_rows(const SamplingRows& call);
int64_t sampling_stream_row_bytes();
void launch_sampling_stream(const SamplingStream& call, cudaStream_t stream);

// By these grids where there is a workspace and they can, else by clusters. Returns whether rows are folded.
inline bool launch_sampling(const SamplingStream& call, cudaStream_t stream) {
  const bool streams = call.workspace != nullptr && streams_rows(call.rows);
  streams ? launch_sampling_stream(call, stream) : launch_sampling_rows(call.rows, stream);
  return streams && call.folds;
}

}  // namespace vocabshard::sm90
