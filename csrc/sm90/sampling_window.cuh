// The end of a row under a top_p, once it is known in which window of y its last kept column lies: several CTAs list
// the candidates and sum what is kept for sure, and the last of them to come does the rest.
#pragma once

#include <cfloat>

#include "sm90/sampling_crossing.cuh"

namespace vocabshard::sm90::sampling {

// A column that may be the last. What CTAs have summed has no candidate in it: `without` is their sum of its tile,
// `with` that with the candidate. A tile with several is read again: the first of them has -1 for `with`, others 0 and
// 0.
struct alignas(16) Candidate {
  int64_t column;  // bits of z above it
  float with, without;
};

// What a thread has of its CTA's share.
struct Collected {
  int64_t total = 0, above = 0;  // masses
  Race race;
  float bound;  // of terms, for who may come first: bound_of

  VS_DEVICE explicit Collected(float bound) : bound(bound) {}
};

// A CTA's share of a row goes to those of the row's other CTAs; of its s.count candidates the first `room` are in
// `list`. True: all are there, the first kListed candidates in `listed`, and there are more where a list had no room.
template <int kThreads>
VS_DEVICE bool come_together(Head& head, PartOfRow* to, const Collected& mine, int32_t parts, const Candidate* list,
                             uint32_t room, Candidate* listed, CrossingShared<kThreads>& s) {
  constexpr int kWarps = kThreads / 32;
  const uint32_t count = s.count;
  if (threadIdx.x == 0 && count > 0) s.few_count = atomicAdd(&head.listed, count > room ? kListed + 1u : count);
  const Words<2> sums = over_block<kWarps>(s.words, Words<2>{{mine.total, mine.above}}, Sum());
  PartOfRow all = part_of_row<kWarps>(s.words, mine.race);
  all.total = sums.x[0], all.above = sums.x[1];
  if (threadIdx.x == 0) *to = all;
  for (uint32_t i = threadIdx.x; i < min(count, room); i += kThreads)
    if (s.few_count + i < kListed)
      *reinterpret_cast<longlong2*>(listed + s.few_count + i) = *reinterpret_cast<const longlong2*>(list + i);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) s.last = atomicAdd(&head.collected, 1u) + 1 == static_cast<uint32_t>(parts);
  __syncthreads();
  if (s.last) __threadfence();
  return s.last;
}

// What the row's last CTA does. `listed`: its candidates; `places`: where their places go; `parts`, `count`: what its
// CTAs had.
template <int kThreads>
__device__ __noinline__ void finish_window(const SamplingStream& call, const Row& row, const Head& head,
                                           const Candidate* listed, int64_t* places, const PartOfRow* parts,
                                           int32_t count, CrossingShared<kThreads>& s) {
  const SamplingRows& p = call.rows;
  const Columns columns = row.columns;
  const float y_max = head.y_max;
  PartOfRow part = {kNoArrival, kNobody, {0, 0, 0}, 0, 0};
  if (threadIdx.x < count) {
    const int64_t* const one = &parts[threadIdx.x].arrival;
    part = {__ldcg(one),
            __ldcg(one + 1),
            {__ldcg(one + 2), __ldcg(one + 3), __ldcg(one + 4)},
            __ldcg(one + 5),
            __ldcg(one + 6)};
  }
  if (threadIdx.x == 0) s.lowest = INT32_MAX, s.highest = INT32_MIN;
  const Words<2> masses = over_block<kThreads / 32>(s.words, Words<2>{{part.total, part.above}}, Sum());
  const uint32_t candidates = __ldcg(&head.listed);
  int64_t cut = kKeepAll;
  bool found = false;
  if (candidates <= kListed) {
    const Listed<kThreads> source =
        place_listed(reinterpret_cast<const int64_t*>(listed), 2, candidates, places, columns, s);
    const int64_t wanted = share_of(p.step[0].number, masses.x[0]) - masses.x[1];
    const Words<2> range = range_of(s.lowest, s.highest);
    int64_t place;
    found = crossing(source, s, {true, row.scale, exp_k(clamp_logit(y_max))}, wanted, range.x[0], range.x[1], place);
    if (found) cut = cut_at(source, place, true);
  }
  Race race;
  Words<kLimbs> kept = {{0, 0, 0}};
  if (found) {
    const Terms term(y_max, row.scale);
    const float cut_z = fmaxf(cut_logit(cut), -FLT_MAX);  // -inf has no term
    const int32_t tie = last_equal(cut, columns);
    logits::Counters without;
    without.clear();
    for (uint32_t i = threadIdx.x; i < candidates; i += kThreads) {
      const int64_t place = places[i];
      const float2 sum = *reinterpret_cast<const float2*>(&listed[i].with);
      if (place >= cut || sum.x < 0.0f) {
        double of_tile = static_cast<double>(sum.x);
        if (sum.x < 0.0f)
          of_tile = TileOfColumns(columns, column_at(columns, place)).sum(term, cut_z, tie, columns.valid);
        race.sum.add_positive(of_tile);
        without.add_positive(static_cast<double>(sum.y));
      }
      if (place < cut || !p.draw) continue;
      const float z = logit_of(static_cast<int32_t>(place >> 32));
      const int64_t id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place));
      if (!is_early(column_word(id, 0, p.seed, row.key), term(z, true), head.bound)) continue;
      const Look look = look_at(clamp_logit(mul(z, term.scale)), id, p.seed, row.key);
      race.first = Smaller()(race.first, Words<2>{{look.arrival, who_is(id, z)}});
    }
    race.first = Smaller()(race.first, part.first());
    int64_t minus[kLimbs];
    without.get(minus);
#pragma unroll
    for (int i = 0; i < kLimbs; ++i) kept.x[i] = part.c[i] - minus[i];
  } else {
    cut = cut_of_all(p, row, y_max, s);
    race_over_all<kThreads>(p, row, y_max, cut, race);
  }
  const PartOfRow whole = part_of_row<kThreads / 32>(s.words, race, kept);
  if (threadIdx.x < 32) put_row(call, row, target_of(p, row), cut, whole.first(), whole.partial(y_max));
}

}  // namespace vocabshard::sm90::sampling
