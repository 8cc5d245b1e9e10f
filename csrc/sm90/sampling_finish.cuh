// What a row's last CTA does with its candidates.
#pragma once

#include "sm90/sampling_crossing.cuh"
#include "sm90/sampling_race.cuh"

namespace vocabshard::sm90::sampling {

VS_DEVICE int64_t candidate(float z, int32_t column) {
  return static_cast<int64_t>((static_cast<uint64_t>(bits(z)) << 32) | static_cast<uint32_t>(column));
}

// Bit 4 i + j of `which`: the j-th column of a thread's i-th piece is a candidate.
template <int kThreads>
VS_DEVICE void append(uint32_t& count, int64_t* list, const Columns& columns, int32_t base, uint32_t which) {
  uint32_t to = atomicAdd(&count, static_cast<uint32_t>(__popc(which)));
  for (; which != 0; which &= which - 1, ++to) {
    const int32_t bit = __ffs(static_cast<int>(which)) - 1, column = base + 4 * kThreads * (bit / 4) + bit % 4;
    if (to < kListed) list[to] = candidate(columns.row[column], column);
  }
}

// The sum of the kept columns of a place's tile, if no column of it before the place has(z, column). `cut_z`, `tie`:
// the cut, z finite and column.
template <class Has>
VS_DEVICE void add_tile_of(const Columns& columns, const Terms& term, float cut_z, int32_t tie, int64_t place,
                           logits::Counters& sum, const Has& has) {
  const auto column =
      static_cast<int32_t>(kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place)) - columns.vocab_start);
  const int32_t first = column / kTile * kTile;
  float4 v[kTile / 4];
  if (first + kTile <= columns.valid) {  // all at once, not one after the other
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) v[i] = *reinterpret_cast<const float4*>(columns.row + first + 4 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) v[i] = columns.four(first + 4 * i);
  }
  uint32_t which = 0;
#pragma unroll
  for (int i = 0; i < kTile / 4; ++i) {
    const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) which |= has(z[j], first + 4 * i + j) ? 1u << (4 * i + j) : 0;
  }
  if ((which & ((1u << (column - first)) - 1)) != 0) return;
  float e[kTile];
#pragma unroll
  for (int i = 0; i < kTile / 4; ++i) {
    if (tie < columns.valid) leave_out(v[i], cut_z, tie - (first + 4 * i));
    const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) e[4 * i + j] = term(z[j], z[j] >= cut_z);
  }
  sum.add_positive(static_cast<double>(tree16(e)));
}

template <int kThreads>
__device__ __noinline__ void race_over_all(const SamplingRows& p, const Row& row, float y_max, int64_t cut,
                                           Race& race) {
  if (p.draw)
    race_over<true>(p, row, y_max, cut, kThreads / 32, race);
  else
    race_over<false>(p, row, y_max, cut, kThreads / 32, race);
}

// Candidates have y in [low, high].
struct Bounds {
  float y_max, low, high;
  int32_t k_max;
};

// What a row's last CTA does. `listed`: its candidates, as append leaves them; `list`: where their places go. kMass:
// other columns were raced by `parts` CTAs, as far as they are kept.
template <bool kMass, int kThreads>
__device__ __noinline__ void finish_row(const SamplingStream& call, const Row& row, const Bounds bounds, uint32_t count,
                                        const int64_t* listed, int64_t* list, int32_t parts,
                                        CrossingShared<kThreads>& s) {
  const SamplingRows& p = call.rows;
  const Workspace work(call.workspace, p.rows);
  const Head& head = work.heads[row.n];
  const Columns& columns = row.columns;
  const float scale = row.scale, y_max = bounds.y_max;
  const int32_t k_max = bounds.k_max;
  int64_t cut = kKeepAll;
  bool found = false;
  if (count <= kListed) {
    int32_t lowest_order = INT32_MAX, highest_order = INT32_MIN;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const auto word = static_cast<uint64_t>(kMass ? __ldcg(listed + i) : listed[i]);
      const float z = from_bits(static_cast<uint32_t>(word >> 32));
      list[i] = place_of(z, columns.vocab_start + static_cast<uint32_t>(word));
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
    const Listed<kThreads> source = {list, static_cast<int32_t>(count)};
    const int32_t from = s.lowest, to = s.highest;
    if constexpr (kMass) {
      const auto whole = static_cast<int64_t>(__ldcg(&head.total)), better = static_cast<int64_t>(__ldcg(&head.above));
      int64_t place;
      found = crossing(source, s, {true, scale, k_max}, share_of(p.step[0].number, whole) - better,
                       static_cast<int64_t>(from) * (int64_t{1} << 32),
                       static_cast<int64_t>(to) * (int64_t{1} << 32) + 0xffffffff, place);
      if (found) cut = cut_at(source, place, true);
    } else {
      found = find_cut(source, s, p, row, y_max, from, to, cut);
    }
  }
  if (!found) {
    const float inf = -neg_inf();
    find_cut(WholeRow<kThreads>{columns}, s, p, row, y_max, order_of(neg_inf()), order_of(inf), cut);
  }
  Race race;
  Words<kLimbs> sums = {{0, 0, 0}};
  if (found) {
    const Terms term(y_max, scale);
    const float bound = kMass ? bound_of(head, term) : from_bits(0x7f800000u);
    const float cut_z = fmaxf(cut_logit(cut), -FLT_MAX);  // -inf has no term
    const int32_t tie = last_equal(cut, columns);
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const int64_t place = list[i];
      add_tile_of(columns, term, cut_z, tie, place, race.sum, [&](float z, int32_t) {
        const float y = mul(z, scale);
        return y >= bounds.low && y <= bounds.high;
      });
      if (place < cut || !p.draw) continue;
      const float z = logit_of(static_cast<int32_t>(place >> 32));
      const int64_t id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place));
      if (kMass && !is_early(column_word(id, 0, p.seed, row.key), term(z, true), bound)) continue;
      const Look look = look_at(clamp_logit(mul(z, scale)), id, p.seed, row.key);
      race.first = Smaller()(race.first, Words<2>{{look.arrival, who_is(id, z)}});
    }
    if (kMass && threadIdx.x < parts) {
      const int64_t* const one = &work.parts[row.n * kMostParts + threadIdx.x].arrival;
      race.first = Smaller()(race.first, Words<2>{{__ldcg(one), __ldcg(one + 1)}});
      sums = {{__ldcg(one + 2), __ldcg(one + 3), __ldcg(one + 4)}};
    }
  } else {
    race_over_all<kThreads>(p, row, y_max, cut, race);
  }
  const PartOfRow whole = part_of_row<kThreads / 32>(s.words, race, sums);
  if (threadIdx.x == 0) put_row(call, row, true, cut, {{whole.arrival, whole.who}}, y_max, whole.c);
}

}  // namespace vocabshard::sm90::sampling
