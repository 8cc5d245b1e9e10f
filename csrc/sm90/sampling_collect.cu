// Second of three grids (sampling_stream.h): one read of every row lists the candidates for its last kept column, and
// sums masses exactly. The last CTA of a row finds the cut; where only what is listed is kept it does all the rest.
#include <algorithm>

#include "sm90/launch.h"
#include "sm90/sampling_crossing.cuh"
#include "sm90/sampling_grids.h"
#include "sm90/sampling_race.cuh"

namespace vocabshard::sm90::sampling {

namespace {

constexpr int kThreads = kCollectThreads, kWarps = kThreads / 32;
constexpr int kPieces = 4;            // float4s that a thread loads at once
constexpr int kBatch = 32 * kPieces;  // columns of a thread whose masses fit into 32 bits
constexpr int kHighBits = 18;         // of a mass, below its high part
constexpr float kHigh = 0x1p+41f;     // one unit in its last place is 2^kHighBits
constexpr int kCollectBytes = 8 * kListed;

// Masses of a thread's columns: their high parts, and what is left, rounded to the nearest integer.
struct Mass {
  uint32_t high;
  int32_t low;
};

// Bit 4 i + j of `which`: the j-th column of a thread's i-th piece is a candidate.
VS_DEVICE void append(uint32_t& count, int64_t* list, const Columns& columns, int32_t base, uint32_t which) {
  uint32_t to = atomicAdd(&count, static_cast<uint32_t>(__popc(which)));
  for (; which != 0; which &= which - 1, ++to) {
    const int32_t bit = __ffs(static_cast<int>(which)) - 1, column = base + 4 * kThreads * (bit / 4) + bit % 4;
    if (to < kListed)
      list[to] = static_cast<int64_t>((static_cast<uint64_t>(bits(columns.row[column])) << 32) |
                                      static_cast<uint32_t>(column));
  }
}

// Of a place among the candidates: its term's tile, if no kept column of it has a lower id.
VS_DEVICE void add_tile_of(const Columns& columns, const Terms& term, int64_t cut, int64_t place, Race& race) {
  const auto column =
      static_cast<int32_t>(kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place)) - columns.vocab_start);
  const int32_t tile = column / kTile * kTile;
  float e[kTile];
  bool first = true;
#pragma unroll
  for (int i = 0; i < kTile; i += 4) {
    const float4 v = columns.four(tile + i);
    const float z[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool kept = place_of(z[j], columns.vocab_start + tile + i + j) >= cut && !is_neg_inf(z[j]);
      first &= !kept || tile + i + j >= column;
      e[i + j] = term(z[j], kept);
    }
  }
  if (first) race.sum.add_positive(static_cast<double>(tree16(e)));
}

__device__ __noinline__ void race_over_all(const SamplingStream& call, int64_t n, const Columns& columns,
                                           const Head& head, int64_t cut, Race& race) {
  if (call.rows.draw)
    race_over<true>(call, n, columns, head, cut, 0, columns.valid, kWarps, race);
  else
    race_over<false>(call, n, columns, head, cut, 0, columns.valid, kWarps, race);
}

// What a row's last CTA does. `list`: where its candidates go.
template <bool kMass>
__device__ __noinline__ void finish_row(const SamplingStream& call, int64_t n, int64_t* list, CrossingShared& s) {
  const SamplingRows& p = call.rows;
  const Workspace work(call.workspace, p.rows);
  Head& head = work.heads[n];
  const int64_t* const listed = work.candidates + n * kListed;
  const Columns columns(p, n);
  const float scale = scale_of(p, n), y_max = head.y_max;
  const int32_t k_max = head.k_max;
  const uint32_t count = __ldcg(&head.listed);
  int64_t cut = kKeepAll;
  bool found = false;
  if (count <= kListed) {
    int32_t lowest_order = INT32_MAX, highest_order = INT32_MIN;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const auto word = static_cast<uint64_t>(__ldcg(listed + i));
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
    const Listed source = {list, static_cast<int32_t>(count)};
    const int32_t from = s.lowest, to = s.highest;
    if constexpr (kMass) {
      const auto whole = static_cast<int64_t>(__ldcg(&head.total)), better = static_cast<int64_t>(__ldcg(&head.above));
      int64_t place;
      found = crossing(source, s, {true, scale, k_max}, share_of(p.step[0].number, whole) - better,
                       static_cast<int64_t>(from) * (int64_t{1} << 32),
                       static_cast<int64_t>(to) * (int64_t{1} << 32) + 0xffffffff, place);
      if (found) cut = cut_at(source, place, true);
    } else {
      found = find_cut(source, s, p, scale, y_max, k_max, from, to, cut);
    }
  }
  const bool by_list = found && !kMass;
  if (!found) {
    const float inf = -neg_inf();
    find_cut(WholeRow{columns}, s, p, scale, y_max, k_max, order_of(neg_inf()), order_of(inf), cut);
  }
  if (threadIdx.x == 0) head.cut = cut;
  if constexpr (kMass) return;

  Race race;
  if (by_list) {
    const Terms term(y_max, scale);
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const int64_t place = list[i];
      if (place < cut) continue;
      add_tile_of(columns, term, cut, place, race);
      if (!p.draw) continue;
      const float z = logit_of(static_cast<int32_t>(place >> 32));
      const int64_t id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place)), row_key = p.row_keys[n];
      const float clock = clock_at(column_word(id, 0, p.seed, row_key), id, p.seed, row_key);
      const Words<2> other = {{arrival_of(clock, clamp_logit(mul(z, scale))), who_is(id, z)}};
      race.first = Smaller()(race.first, other);
    }
  } else {
    race_over_all(call, n, columns, head, cut, race);
  }
  const PartOfRow whole = part_of_row<kWarps>(s.words, race);
  if (threadIdx.x == 0) put_row(call, n, true, cut, {{whole.arrival, whole.who}}, y_max, whole.c);
}

template <bool kMass>
__global__ void __launch_bounds__(kThreads, 2)
    collect_kernel(const __grid_constant__ SamplingStream call, int32_t part_columns, int32_t parts) {
  extern __shared__ __align__(128) int64_t list[];
  __shared__ CrossingShared s;
  const SamplingRows& p = call.rows;
  const int64_t n = blockIdx.x / parts;
  const int32_t part = static_cast<int32_t>(blockIdx.x % parts);
  const Workspace work(call.workspace, p.rows);
  Head& head = work.heads[n];
  if (threadIdx.x == 0) s.count = 0, s.lowest = INT32_MAX, s.highest = INT32_MIN;
  __syncthreads();
  ptx::grid_wait();
  ptx::grid_launch_next();
  const Words<2> nobody = {{kNoArrival, kNobody}};
  if (!head.usable) {
    if (part == 0 && threadIdx.x == 0) put_row(call, n, false, kKeepAll, nobody, 0.0f, nullptr);
    return;
  }
  const Columns columns(p, n);
  const float scale = scale_of(p, n), low = head.low, high = head.high;
  const int32_t k_max = head.k_max;
  const int32_t begin = part * part_columns, end = min(columns.valid, begin + part_columns);

  int64_t total = 0, above = 0;
  const int32_t R = k_max - kMassBits;
  const float magic = static_cast<float>(12582912 - R), lowest = mul(static_cast<float>(k_max - 62), logits::kLn2f);
  for (int32_t batch = begin; batch < end; batch += kThreads * kBatch) {
    Mass all = {0, 0}, better = {0, 0};
    const int32_t batch_end = min(end, batch + kThreads * kBatch);
    for (int32_t base = batch + 4 * static_cast<int32_t>(threadIdx.x); base < batch_end;
         base += 4 * kPieces * kThreads) {
      float4 v[kPieces];
      if (base - 4 * static_cast<int32_t>(threadIdx.x) + 4 * kPieces * kThreads <= end) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          v[i] = *reinterpret_cast<const float4*>(columns.row + base + 4 * kThreads * i);
      } else {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int32_t at = base + 4 * kThreads * i;
          v[i] = columns.four(at < end ? at : columns.valid);
        }
      }
      uint32_t which = 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float y = mul(z[j], scale);
          which |= y >= low && y <= high ? 1u << (4 * i + j) : 0;
          if constexpr (kMass) {
            const float e = logits::scaled_exp(fmaxf(y, lowest), magic);
            const float t = add(e, kHigh), u = add(add(e, -add(t, -kHigh)), kMagic);
            const uint32_t m_high = bits(t) - bits(kHigh);
            const int32_t m_low = static_cast<int32_t>(bits(u)) - kMagicBits;
            all.high += m_high;
            all.low += m_low;
            better.high += y > high ? m_high : 0;
            better.low += y > high ? m_low : 0;
          }
        }
      }
      if (which != 0) append(s.count, list, columns, base, which);
    }
    total += (static_cast<int64_t>(all.high) << kHighBits) + all.low;
    above += (static_cast<int64_t>(better.high) << kHighBits) + better.low;
  }

  // into the row's list and sums; the last CTA to come here goes on
  if constexpr (kMass) {
    const Words<2> sums = over_block<kWarps>(s.words, Words<2>{{total, above}}, Sum());
    if (threadIdx.x == 0) {
      atomicAdd(&head.total, static_cast<unsigned long long>(sums.x[0]));
      atomicAdd(&head.above, static_cast<unsigned long long>(sums.x[1]));
    }
  }
  __syncthreads();
  const uint32_t mine = s.count;
  __syncthreads();
  if (threadIdx.x == 0) s.few_count = mine > 0 ? atomicAdd(&head.listed, mine) : 0;
  __syncthreads();
  int64_t* const listed = work.candidates + n * kListed;
  for (uint32_t i = threadIdx.x; i < min(mine, static_cast<uint32_t>(kListed)); i += kThreads)
    if (s.few_count + i < kListed) listed[s.few_count + i] = list[i];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) s.last = atomicAdd(&head.collected, 1u) + 1 == static_cast<uint32_t>(parts);
  __syncthreads();
  if (!s.last) return;
  __threadfence();

  finish_row<kMass>(call, n, list, s);
}

}  // namespace

void launch_collect(const SamplingStream& call, cudaStream_t stream) {
  const SamplingRows& p = call.rows;
  const bool by_mass = p.steps == 1 && p.step[0].kind == kTopP;
  const auto kernel = by_mass ? collect_kernel<true> : collect_kernel<false>;
  static OncePerDevice allowed[2];
  allowed[by_mass]([&] {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCollectBytes),
          "shared memory of the sampling kernel");
  });
  const Parts parts = parts_of(p.rows, p.valid, 4 * kThreads, 2 * multiprocessor_count());
  launch_grid(kernel, p.rows * parts.count, kThreads, kCollectBytes, stream, call, parts.columns, parts.count);
}

}  // namespace vocabshard::sm90::sampling
