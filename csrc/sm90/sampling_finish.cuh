// The rest of a row, once candidates for what is kept are listed, by one CTA.
#pragma once

#include "sm90/sampling_crossing.cuh"
#include "sm90/sampling_race.cuh"

namespace vocabshard::sm90::sampling {

VS_DEVICE int64_t candidate(float z, int32_t column) {
  return static_cast<int64_t>((static_cast<uint64_t>(bits(z)) << 32) | static_cast<uint32_t>(column));
}

template <int kThreads>
__device__ __noinline__ void race_over_all(const SamplingRows& p, const Row& row, float y_max, int64_t cut,
                                           Race& race) {
  if (p.draw)
    race_over<true>(p, row, y_max, cut, kThreads / 32, race);
  else
    race_over<false>(p, row, y_max, cut, kThreads / 32, race);
}

// `listed`: candidates, whose y are at least `low`, and no other column's; their places take their place. More than
// kListed: they are not all there. False: `total` does not tell.
template <int kThreads>
__device__ __noinline__ bool finish_row(const SamplingStream& call, const Row& row, float y_max, float low,
                                        uint32_t count, int64_t* listed, const Total& total,
                                        CrossingShared<kThreads>& s) {
  const SamplingRows& p = call.rows;
  const Columns& columns = row.columns;
  int64_t cut = kKeepAll;
  bool found = false;
  if (count <= kListed) {
    int32_t lowest_order = INT32_MAX, highest_order = INT32_MIN;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const auto word = static_cast<uint64_t>(listed[i]);
      const float z = from_bits(static_cast<uint32_t>(word >> 32));
      listed[i] = place_of(z, columns.vocab_start + static_cast<uint32_t>(word));
      lowest_order = min(lowest_order, order_of(z));
      highest_order = max(highest_order, order_of(z));
    }
    lowest_order = __reduce_min_sync(kAllLanes, lowest_order);
    highest_order = __reduce_max_sync(kAllLanes, highest_order);
    if (threadIdx.x % 32 == 0) {
      atomicMin(&s.lowest, lowest_order);
      atomicMax(&s.highest, highest_order);
    }
    __syncthreads();
    const Listed<kThreads> source = {listed, static_cast<int32_t>(count)};
    found = find_cut(source, s, p, row, y_max, s.lowest, s.highest, total, cut);
  }
  if (!found && total.high > 0) return false;
  if (!found) {
    const float inf = -neg_inf();
    find_cut(WholeRow<kThreads>{columns}, s, p, row, y_max, order_of(neg_inf()), order_of(inf), {}, cut);
  }
  Race race;
  if (found) {
    const Terms term(y_max, row.scale);
    const float cut_z = fmaxf(cut_logit(cut), -FLT_MAX);  // -inf has no term
    const int32_t tie = last_equal(cut, columns);
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const int64_t place = listed[i];
      add_tile_of(columns, term, cut_z, tie, place, race.sum,
                  [&](float z, int32_t) { return mul(z, term.scale) >= low; });
      if (place < cut || !p.draw) continue;
      const float z = logit_of(static_cast<int32_t>(place >> 32));
      const int64_t id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place));
      const Look look = look_at(clamp_logit(mul(z, row.scale)), id, p.seed, row.key);
      race.first = Smaller()(race.first, Words<2>{{look.arrival, who_is(id, z)}});
    }
  } else {
    race_over_all<kThreads>(p, row, y_max, cut, race);
  }
  const PartOfRow whole = part_of_row<kThreads / 32>(s.words, race);
  if (threadIdx.x == 0) put_row(call, row, cut, whole.first(), whole.partial(y_max));
  return true;
}

}  // namespace vocabshard::sm90::sampling
