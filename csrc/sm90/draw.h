// Tokens drawn beside the forward (docs/operators/sampling.md, "Drawing a token"): who won, and what it was with.
#pragma once

#include "contract.h"
#include "sampling.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

// The column whose clock goes off first of those looked at.
struct alignas(16) Winner {
  int64_t arrival;
  int64_t at;  // its number, and in the low half the bits of its y
};

constexpr int kWinnerWords = 2;
constexpr int64_t kNobody = INT64_MAX;

VS_DEVICE Winner nobody() { return {kNoArrival, kNobody}; }
VS_DEVICE Winner winner_of(int64_t arrival, int64_t number, float y) {
  return {arrival, number << 32 | static_cast<int64_t>(bits(y))};
}

VS_DEVICE Winner earlier(const Winner& a, const Winner& b) {
  return b.arrival < a.arrival || (b.arrival == a.arrival && b.at < a.at) ? b : a;
}

VS_DEVICE Winner earlier_by_shuffle(const Winner& mine, int by) {
  return earlier(mine, {__shfl_xor_sync(~0u, mine.arrival, by), __shfl_xor_sync(~0u, mine.at, by)});
}

// In words `stride` apart.
VS_DEVICE void winner_store(int64_t* out, int64_t stride, const Winner& w) {
  out[0] = w.arrival;
  out[stride] = w.at;
}
VS_DEVICE Winner winner_load(const int64_t* from, int64_t stride) { return {from[0], from[stride]}; }

// What a row draws, with its y as the record's target; -1 in a row without a distribution. p: of the whole row.
VS_DEVICE int64_t drawn_token(Partial& p, const Winner& w) {
  p.y_target = quiet_nan();
  const bool usable = p.y_max > -kLogitLimit && p.y_max <= kLogitLimit;
  if (!usable || w.arrival == kNoArrival) return -1;
  p.y_target = from_bits(static_cast<uint32_t>(w.at));
  return w.at >> 32;
}

}  // namespace vocabshard::sm90
