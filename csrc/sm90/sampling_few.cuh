// The rest of a row of which few candidates are left, one a thread: sorted, cut, raced and summed.
#pragma once

#include "sm90/sampling_finish.cuh"

namespace vocabshard::sm90::sampling {

// What all columns' masses come to, at least and at most; high = 0: what those of the candidates do.
struct Total {
  int64_t low, high;
};

// How many of `count` places, best first and this thread's `place`, the steps keep; 0: a step wants more than there
// are, or both ends of `total` do not say the same.
template <int kThreads>
VS_DEVICE int32_t keep_best(const SamplingRows& p, const Row& row, float y_max, int64_t place, int32_t count,
                            const Total& total, CrossingShared<kThreads>& s) {
  const auto i = static_cast<int32_t>(threadIdx.x), order = static_cast<int32_t>(place >> 32);
  const float y = mul(logit_of(order), row.scale);
  int32_t kept = count;
#pragma unroll 1
  for (int k = 0; k < p.steps; ++k) {
    const SamplingStep& step = p.step[k];
    if (step.kind == kMinP) {
      const float threshold = static_cast<float>(add(static_cast<double>(y_max), step.ln));
      kept = min(kept, __syncthreads_count(i < count && y >= threshold));
    } else if (step.kind == kTopK) {
      const auto last = static_cast<int32_t>(min(step.number, static_cast<int64_t>(row.columns.valid))) - 1;
      if (last >= count) return 0;
      const auto lowest = static_cast<int32_t>(s.few_mass[last] >> 32);
      kept = min(kept, __syncthreads_count(i < count && order >= lowest));
    } else {
      const int64_t mass = i < kept ? mass_fast(y, exp_k(clamp_logit(y_max))) : 0;
      const int64_t up_to = up_to_thread<kThreads / 32>(s.words, mass);
      if (i == kThreads - 1) s.above = up_to;
      __syncthreads();
      const bool whole = k == 0 && total.high > 0;  // of more than the listed
      const int64_t most = share_of(step.number, whole ? total.high : s.above);
      if (most > s.above) return 0;
      const int32_t before = __syncthreads_count(i < kept && up_to < most);
      if (whole && before != __syncthreads_count(i < kept && up_to < share_of(step.number, total.low))) return 0;
      kept = min(kept, 1 + before);
    }
  }
  return kept;
}

// `count` places in s.few, at most kThreads, which are all that the steps may keep. False: they are not, or `total`
// does not tell.
template <int kThreads>
VS_DEVICE bool finish_few(const SamplingStream& call, const Row& row, float y_max, int32_t count, const Total& total,
                          CrossingShared<kThreads>& s) {
  static_assert(kThreads == kFewPlaces);
  const SamplingRows& p = call.rows;
  const auto i = static_cast<int32_t>(threadIdx.x);
  const int64_t target_id = target_id_of(p, row.n);
  int64_t place = s.few[i];
  int32_t better = 0;
#pragma unroll 4
  for (int32_t j = 0; j < count; j += 2) {
    const longlong2 two = *reinterpret_cast<const longlong2*>(&s.few[j]);
    better += (two.x > place) + (two.y > place);
  }
  if (i < count) s.few_mass[better] = place;
  __syncthreads();
  place = s.few_mass[i];
  const int32_t column = i < count ? column_at(row.columns, place) : 0;
  TileOfColumns tile(row.columns, column);  // asked for, before it is known whether it is kept
  const Target target = target_of(row, target_id);
  const int32_t kept = keep_best(p, row, y_max, place, count, total, s);
  if (kept == 0) return false;
  int64_t cut = s.few_mass[kept - 1];
  if (kept == count || s.few_mass[kept] >> 32 != cut >> 32) cut &= ~int64_t{0xffffffff};  // none of its equals is left

  Race race;
  const Terms term(y_max, row.scale);
  const float cut_z = fmaxf(cut_logit(cut), -FLT_MAX);  // -inf has no term
  const int32_t last = last_equal(cut, row.columns);
  // tiles and clocks by warps of their own, if there are enough
  const bool apart = 2 * kept <= kThreads;
  if (i < kept)
    add_tile_of(tile, column, row.columns.valid, term, cut_z, last, race.sum,
                [&](float z, int32_t at) { return z > cut_z || (z == cut_z && at <= last); });
  const int32_t racing = apart ? i - kThreads / 2 : i;
  if (p.draw && racing >= 0 && racing < kept) {
    if (apart) place = s.few_mass[racing];
    const float z = logit_of(static_cast<int32_t>(place >> 32));
    const int64_t id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place));
    const Look look = look_at(clamp_logit(mul(z, row.scale)), id, p.seed, row.key);
    race.first = {{look.arrival, who_is(id, z)}};
  }
  finish_race(call, row, target, cut, y_max, part_of(race), s);
  return true;
}

}  // namespace vocabshard::sm90::sampling
