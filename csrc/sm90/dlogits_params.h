// What the dlogits kernel is given.
#pragma once

#include "sm90/dlogit.h"
#include "sm90/dlogits.h"
#include "sm90/params.h"

namespace vocabshard::sm90 {

struct alignas(128) DlogitsParams {
  Operands operands;
  const void* bias;
  int32_t bias_type;
  int32_t rows, columns, first_column, groups;  // groups: of 64 columns
  int32_t units, rounds, band, tile_groups;     // see BlockWalk: blocks of rows, or pairs of them
  float cap;
  const DlogitsRow* row_terms;
  void* out;
  int64_t out_row;
  float* bias_sums;
  const int64_t* cut;   // [rows] or null, never in the plain kernel
  int64_t vocab_start;  // global id of the block's first column
};

// Few rows fill a block of 64; more columns then keep more loads in flight.
constexpr WgmmaShape kDlogitsShape = {2, 3}, kDlogitsFewShape = {1, 4};
constexpr int64_t kDlogitsFewRows = 64;

struct DlogitsLaunch {
  int32_t clusters;
  bool few;     // kDlogitsFewShape
  bool behind;  // may be set up while the grid before it runs, whose rows' terms alone it has to wait for
};

// One translation unit an element type: they take long to compile.
void launch_dlogits_bf16(const DlogitsParams& p, DlogitsKind kind, DlogitsLaunch launch, cudaStream_t stream);
void launch_dlogits_fp16(const DlogitsParams& p, DlogitsKind kind, DlogitsLaunch launch, cudaStream_t stream);

}  // namespace vocabshard::sm90
