// The end of a row under a top_p, once it is known in which window of y its last kept column lies: several CTAs list
// the candidates and sum what is kept for sure, and one of them does the rest once all have come.
#pragma once

#include "sm90/sampling_crossing.cuh"

namespace vocabshard::sm90::sampling {

// A column that may be the last. What CTAs have summed has no candidate in it: `without` is their sum of its tile,
// `with` that with the candidate. A tile with several is read again: the first of them has -1 for `with`, others 0 and
// 0.
struct alignas(16) Candidate {
  int64_t column;  // bits of z above it
  float with, without;
};

// The same in the CTA that finishes the row.
struct alignas(16) Waiting {
  int64_t place;
  float with, without;
};

// What a thread has of its CTA's share.
struct Collected {
  int64_t total = 0, above = 0;  // masses
  Race race;
  float bound;  // of terms, for who may come first: bound_of

  VS_DEVICE explicit Collected(float bound) : bound(bound) {}
};

// Whether this CTA is to finish the row, which one of its `parts` CTAs does, by one thread. The first one waits for the
// others, as it has run before; if that takes long, the last one does it, as the others may not have begun: they may
// need the place that this one holds.
VS_DEVICE bool finishes_row(uint32_t* collected, bool first, uint32_t parts) {
  constexpr uint32_t kGivenUp = 1 << 16;
  constexpr int kMostPolls = 500;
  constexpr uint32_t kBetween = 50;  // ns
  const uint32_t others = ptx::add_in_turn(collected, 1);
  if (others == parts - 1 || !first) return others == parts - 1 + (first ? 0 : kGivenUp);
  const auto* const word = reinterpret_cast<const int32_t*>(collected);
  for (int i = 0; i < kMostPolls; ++i) {
    if (ptx::load_acquire(word) == static_cast<int32_t>(parts)) return true;
    ptx::pause(kBetween);
  }
  return ptx::add_in_turn(collected, kGivenUp) == parts;
}

// A CTA's share of a row goes to those of the row's other CTAs; of its s.count candidates the first `room` are in
// `list`. True: all are there, the first kListed candidates in `listed`, and there are more where a list had no room.
template <int kThreads>
VS_DEVICE bool come_together(Head& head, PartOfRow* to, const Collected& mine, bool first, int32_t parts,
                             const Candidate* list, uint32_t room, Candidate* listed, CrossingShared<kThreads>& s) {
  const uint32_t count = s.count;
  uint32_t place = 0;
  if (threadIdx.x == 0 && count > 0) place = atomicAdd(&head.listed, count > room ? kListed + 1u : count);
  PartOfRow part = part_of(mine.race);
  part.total = mine.total, part.above = mine.above;
  put_part<2>(s.parts, part);
  if (threadIdx.x == 0) s.few_count = place;  // not before: its way there and back takes long
  __syncthreads();
  if (threadIdx.x < 32) {
    part = whole_part<kThreads / 32, 3>(s.parts);
    if (threadIdx.x == 0) *to = part;
  }
  place = s.few_count;
  for (uint32_t i = threadIdx.x; i < min(count, room); i += kThreads)
    if (place + i < kListed)
      *reinterpret_cast<longlong2*>(listed + place + i) = *reinterpret_cast<const longlong2*>(list + i);
  __syncthreads();
  if (threadIdx.x == 0) s.last = finishes_row(&head.collected, first, static_cast<uint32_t>(parts));
  __syncthreads();
  return s.last;
}

// The place among `count` in [low, high] at which masses, best first, reach `wanted`; kKeepAll: they don't. s.bins are
// empty, s.bin is -1, s.few_count 0, s.answer kKeepAll.
template <int kThreads>
VS_DEVICE int64_t place_reached(const Waiting* list, uint32_t count, float scale, int32_t k_max, int64_t wanted,
                                int64_t low, int64_t high, CrossingShared<kThreads>& s) {
  constexpr int kBits = 9;
  static_assert(kThreads == 1 << kBits, "a bin a thread");
  if (wanted < 1) return kKeepAll;
  const auto mass = [&](int64_t place) {
    return mass_fast(mul(logit_of(static_cast<int32_t>(place >> 32)), scale), k_max);
  };
  const auto each = [&](const auto& take) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count; i += kThreads)
      if (list[i].place >= low && list[i].place <= high) take(list[i].place);
  };
#pragma unroll 1
  while (true) {
    const uint64_t width = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    const int shift = max(0, 64 - kBits - __clzll(static_cast<int64_t>(width)));
    each([&](int64_t place) {
      const uint64_t depth = static_cast<uint64_t>(high) - static_cast<uint64_t>(place);
      add_mass(s.bins[depth >> shift], mass(place));
    });
    __syncthreads();
    const int64_t own = whole_mass(s.bins[threadIdx.x]), up_to = up_to_thread<kThreads / 32>(s.words, own);
    if (up_to - own < wanted && wanted <= up_to) s.bin = static_cast<int32_t>(threadIdx.x), s.above = up_to - own;
    __syncthreads();
    if (s.bin < 0) return kKeepAll;
    wanted -= s.above;
    high = static_cast<int64_t>(static_cast<uint64_t>(high) - (static_cast<uint64_t>(s.bin) << shift));
    if (static_cast<uint64_t>(high) - static_cast<uint64_t>(low) >> shift != 0)
      low = high - static_cast<int64_t>((uint64_t{1} << shift) - 1);
    each([&](int64_t place) {
      const uint32_t i = atomicAdd(&s.few_count, 1u);
      if (i < kFewPlaces) s.few[i] = place, s.few_mass[i] = mass(place);
    });
    __syncthreads();
    if (s.few_count <= kFewPlaces) break;
    __syncthreads();
    s.bins[threadIdx.x] = {};
    if (threadIdx.x == 0) s.bin = -1, s.few_count = 0;
    __syncthreads();
  }
  const uint32_t few = s.few_count;
  if (threadIdx.x < few) {
    const int64_t mine = s.few[threadIdx.x];
    int64_t above = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < few; ++i) above += s.few[i] > mine ? s.few_mass[i] : 0;
    if (above < wanted && wanted <= above + s.few_mass[threadIdx.x]) s.answer = mine;
  }
  __syncthreads();
  return s.answer;
}

// The bound that who arrives at (earliest + 1) 2^16 or before gives.
VS_DEVICE float bound_of_arrival(int32_t earliest, const Terms& term) {
  const int64_t R = 12582912 - static_cast<int64_t>(term.magic);
  const int64_t b = (int64_t{earliest} + 1) * (1 << 16) + R * (1 << 23);
  constexpr int64_t kLeast = 0x00800000, kMost = 0x7f800000;
  return fmaxf(mul(from_bits(static_cast<uint32_t>(min(max(b, kLeast), kMost))), kPassShare), 1e-37f);
}

// What the CTA does that finishes a row. `listed`: the row's candidates, as many as there are places for them in
// `list`; `parts`, `count`: what its CTAs had; `bound`: of terms, for who may come first.
//
// All of it is latency, of memory and of code that nobody has fetched: what has to be read is asked for at once, and
// there is little code.
template <int kThreads>
VS_DEVICE void finish_window(const SamplingStream& call, const Row& row, float y_max, float bound,
                             const uint32_t* candidates, const Candidate* listed, Waiting* list, const PartOfRow* parts,
                             int32_t count, CrossingShared<kThreads>& s) {
  constexpr int kPartWarps = (kMostParts + 31) / 32;
  const SamplingRows& p = call.rows;
  const Columns& columns = row.columns;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32), warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto load = [&](uint32_t i) {
    const auto* const words = reinterpret_cast<const int64_t*>(listed + i);
    const auto sums = static_cast<uint64_t>(__ldcg(words + 1));
    return Waiting{__ldcg(words), from_bits(static_cast<uint32_t>(sums)), from_bits(static_cast<uint32_t>(sums >> 32))};
  };
  Waiting next = load(threadIdx.x);  // there may be fewer
  uint32_t n = __ldcg(candidates);
  PartOfRow part = no_part();
  if (threadIdx.x < count) {
    const int64_t* const one = &parts[threadIdx.x].arrival;
    part = {__ldcg(one),
            __ldcg(one + 1),
            {__ldcg(one + 2), __ldcg(one + 3), __ldcg(one + 4)},
            __ldcg(one + 5),
            __ldcg(one + 6)};
  }
  const int64_t target_id = target_id_of(p, row.n);
  auto* const several = reinterpret_cast<uint16_t*>(s.bins + kThreads);  // the first candidates of tiles with several
  static_assert(kCrossingBins == 2 * kThreads && kListed / 2 * sizeof(uint16_t) <= sizeof(Bin) * kThreads);
  s.bins[threadIdx.x] = {};
  if (threadIdx.x == 0) {
    s.lowest = INT32_MAX, s.highest = INT32_MIN;
    s.count = s.few_count = 0, s.bin = -1, s.answer = kKeepAll;
  }
  __syncthreads();

  const bool all_there = n <= kListed;
  if (!all_there) n = 0;
  int32_t lowest = INT32_MAX, highest = INT32_MIN;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
    const int64_t place = place_of_candidate(next.place, columns);
    list[i] = {place, next.with, next.without};
    if (next.with < 0.0f) several[atomicAdd(&s.count, 1u)] = static_cast<uint16_t>(i);
    if (i + kThreads < n) next = load(i + kThreads);
    lowest = min(lowest, static_cast<int32_t>(place >> 32));
    highest = max(highest, static_cast<int32_t>(place >> 32));
  }
  lowest = __reduce_min_sync(kAllLanes, lowest);
  highest = __reduce_max_sync(kAllLanes, highest);
  if (lane == 0) {
    atomicMin(&s.lowest, lowest);
    atomicMax(&s.highest, highest);
  }
  if (warp < kPartWarps) {
    const int64_t total = sum_of_warp(part.total), above = sum_of_warp(part.above);
    const auto arrival = static_cast<int32_t>(min(part.arrival >> 16, int64_t{INT32_MAX}));
    const int32_t earliest = __reduce_min_sync(kAllLanes, arrival);
    if (lane == 0) s.words[warp][0] = total, s.words[warp][1] = above, s.words[warp][2] = earliest;
  }
  __syncthreads();
  int64_t total = 0, above = 0, earliest = INT32_MAX;
#pragma unroll
  for (int w = 0; w < kPartWarps; ++w) {
    total += s.words[w][0], above += s.words[w][1];
    earliest = min(earliest, s.words[w][2]);
  }

  // tiles with several: half a warp reads one, before it is known what of it is kept
  const uint32_t tiles = s.count;
  uint32_t tile = threadIdx.x / kTile;
  int32_t column = 0;
  float z_of_tile = neg_inf();
  const auto load_tile = [&] {
    if (tile >= tiles) return;
    column = column_at(columns, list[several[tile]].place) / kTile * kTile + lane % kTile;
    z_of_tile = column < columns.valid ? columns.row[column] : neg_inf();
  };
  load_tile();
  const Target target = target_of(row, target_id);

  int64_t cut = kKeepAll;
  if (all_there) {
    const Words<2> range = range_of(s.lowest, s.highest);
    const int64_t wanted = share_of(p.step[0].number, total) - above;
    cut = place_reached(list, n, row.scale, exp_k(clamp_logit(y_max)), wanted, range.x[0], range.x[1], s);
  }
  PartOfRow mine;
  if (cut != kKeepAll) {
    bool behind = false;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n; i += kThreads)
      behind |= list[i].place >> 32 == cut >> 32 && list[i].place < cut;
    if (!__syncthreads_or(behind)) cut &= ~int64_t{0xffffffff};  // none of its equals is left out

    const Terms term(y_max, row.scale);
    bound = fminf(bound, bound_of_arrival(static_cast<int32_t>(earliest), term));
    Race race;
    logits::Counters without;
    without.clear();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
      const Waiting c = list[i];
      const bool kept = c.place >= cut;
      race.sum.add_positive(static_cast<double>(kept ? fmaxf(c.with, 0.0f) : 0.0f));
      without.add_positive(static_cast<double>(kept || c.with < 0.0f ? c.without : 0.0f));
      if (!kept || !p.draw) continue;
      const float z = logit_of(static_cast<int32_t>(c.place >> 32));
      const int64_t id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(c.place));
      if (!is_early(column_word(id, 0, p.seed, row.key), term(z, true), bound)) continue;
      const Look look = look_at(clamp_logit(mul(z, term.scale)), id, p.seed, row.key);
      race.first = Smaller()(race.first, Words<2>{{look.arrival, who_is(id, z)}});
    }
#pragma unroll 1
    while (__any_sync(kAllLanes, tile < tiles)) {
      float sum = term(z_of_tile, place_of(z_of_tile, columns.vocab_start + column) >= cut);
#pragma unroll
      for (int step = 1; step < kTile; step *= 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, step));  // as tree16
      if (tile < tiles && lane % kTile == 0) race.sum.add_positive(static_cast<double>(sum));
      tile += kThreads / kTile;
      load_tile();
    }
    race.first = Smaller()(race.first, part.first());
    int64_t minus[kLimbs];
    without.get(minus);
    mine = part_of(race);
#pragma unroll
    for (int i = 0; i < kLimbs; ++i) mine.c[i] += part.c[i] - minus[i];
  } else {
    const Row same = row;  // its address is taken
    Race race;
    cut = cut_of_all(p, same, y_max, s);
    race_over_all<kThreads>(p, same, y_max, cut, race);
    mine = part_of(race);
  }
  finish_race(call, row, target, cut, y_max, mine, s);
}

}  // namespace vocabshard::sm90::sampling
