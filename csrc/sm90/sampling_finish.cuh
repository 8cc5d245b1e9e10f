// The rest of a row, once candidates for what is kept are listed, by one CTA.
#pragma once

#include "sm90/sampling_crossing.cuh"
#include "sm90/sampling_race.cuh"

namespace vocabshard::sm90::sampling {

// `listed`: candidates, whose y are at least `low`, and no other column's; their places take their place. More than
// kListed: they are not all there.
template <int kThreads>
__device__ __noinline__ void finish_row(const SamplingStream& call, const Row& row, float y_max, float low,
                                        uint32_t count, int64_t* listed, CrossingShared<kThreads>& s) {
  const SamplingRows& p = call.rows;
  const Columns& columns = row.columns;
  int64_t cut = kKeepAll;
  bool found = false;
  if (count <= kListed) {
    const Listed<kThreads> source = place_listed(listed, count, columns, s);
    found = find_cut(source, s, p, row, y_max, s.lowest, s.highest, cut);
  }
  if (!found) cut = cut_of_all(p, row, y_max, s);
  Race race;
  if (found) {
    const Terms term(y_max, row.scale);
    const float cut_z = fmaxf(cut_logit(cut), -FLT_MAX);  // -inf has no term
    const int32_t tie = last_equal(cut, columns);
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const int64_t place = listed[i];
      const int32_t column = column_at(columns, place);
      TileOfColumns tile(columns, column);
      add_tile_of(tile, column, columns.valid, term, cut_z, tie, race.sum,
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
  finish_race(call, row, target_of(row, target_id_of(p, row.n)), cut, y_max, part_of(race), s);
}

}  // namespace vocabshard::sm90::sampling
