// Second of two grids for a top_p (sampling_stream.h): one read of every row lists the candidates for its last kept
// column, sums masses exactly, and races and sums what is better. The last CTA of a row finds the cut and does the
// rest.
#include "sm90/launch.h"
#include "sm90/sampling_crossing.cuh"
#include "sm90/sampling_grids.h"

namespace vocabshard::sm90::sampling {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kPieces = 4;  // float4s that a thread loads at once
constexpr int kCollectBytes = 8 * kListed;
constexpr int kBatch = 32 * kPieces;  // columns of a thread whose masses fit into 32 bits
constexpr int kHighBits = 18;         // of a mass, below its high part
constexpr float kHigh = 0x1p+41f;     // one unit in its last place is 2^kHighBits

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
    if (to < kListed) list[to] = candidate(columns.row[column], column);
  }
}

// What the row's last CTA does. `listed`: its candidates; `list`: where their places go.
__device__ __noinline__ void finish(const SamplingStream& call, const Row& row, const Head& head, uint32_t count,
                                    const int64_t* listed, int64_t* list, int32_t parts, CrossingShared<kThreads>& s) {
  const SamplingRows& p = call.rows;
  const Columns columns = row.columns;
  const float y_max = head.y_max, low = head.low, high = head.high;
  int64_t cut = kKeepAll;
  bool found = false;
  if (count <= kListed) {
    const Listed<kThreads> source = place_listed(listed, count, list, columns, s);
    const auto whole = static_cast<int64_t>(__ldcg(&head.total)), better = static_cast<int64_t>(__ldcg(&head.above));
    const int64_t wanted = share_of(p.step[0].number, whole) - better;
    const Words<2> range = range_of(s.lowest, s.highest);
    int64_t place;
    found = crossing(source, s, {true, row.scale, head.k_max}, wanted, range.x[0], range.x[1], place);
    if (found) cut = cut_at(source, place, true);
  }
  Race race;
  Words<kLimbs> sums = {{0, 0, 0}};
  if (found) {
    const Terms term(y_max, row.scale);
    const float bound = head.bound;
    const float cut_z = fmaxf(cut_logit(cut), -FLT_MAX);  // -inf has no term
    const int32_t tie = last_equal(cut, columns);
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const int64_t place = list[i];
      add_tile_of(columns, term, cut_z, tie, place, race.sum, [&](float z, int32_t) {
        const float y = mul(z, term.scale);
        return y >= low && y <= high;
      });
      if (place < cut || !p.draw) continue;
      const float z = logit_of(static_cast<int32_t>(place >> 32));
      const int64_t id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place));
      if (!is_early(column_word(id, 0, p.seed, row.key), term(z, true), bound)) continue;
      const Look look = look_at(clamp_logit(mul(z, term.scale)), id, p.seed, row.key);
      race.first = Smaller()(race.first, Words<2>{{look.arrival, who_is(id, z)}});
    }
    if (threadIdx.x < parts) {
      const int64_t* const one = &Workspace(call.workspace, p.rows).parts[row.n * kMostParts + threadIdx.x].arrival;
      race.first = Smaller()(race.first, Words<2>{{__ldcg(one), __ldcg(one + 1)}});
      sums = {{__ldcg(one + 2), __ldcg(one + 3), __ldcg(one + 4)}};
    }
  } else {
    cut = cut_of_all(p, row, y_max, s);
    race_over_all<kThreads>(p, row, y_max, cut, race);
  }
  const PartOfRow whole = part_of_row<kWarps>(s.words, race, sums);
  if (threadIdx.x == 0) put_row(call, row, cut, whole.first(), whole.partial(y_max));
}

template <bool kDraw>
__global__ void __launch_bounds__(kThreads, 1)
    collect_kernel(const __grid_constant__ SamplingStream call, int32_t part_columns, int32_t parts) {
  extern __shared__ __align__(128) int64_t list[];
  __shared__ CrossingShared<kThreads> s;
  const SamplingRows& p = call.rows;
  const int64_t n = blockIdx.x / parts;
  const int32_t part = static_cast<int32_t>(blockIdx.x % parts);
  const Workspace work(call.workspace, p.rows);
  Head& head = work.heads[n];
  if (threadIdx.x == 0) s.count = 0, s.lowest = INT32_MAX, s.highest = INT32_MIN;
  __syncthreads();
  ptx::grid_wait();
  ptx::grid_launch_next();
  const Row row = row_of(p, n);
  if (call.maxima_there && head.decided) return;
  if (!head.usable) {
    if (part == 0 && threadIdx.x == 0)
      put_row(call, row, kKeepAll, {{kNoArrival, kNobody}}, record_load<false>(call.uncut + n, p.rows));
    return;
  }
  const Columns columns = row.columns;
  const float scale = row.scale, low = head.low, high = head.high;
  const int32_t k_max = head.k_max;
  const int32_t begin = part * part_columns, end = min(columns.valid, begin + part_columns);

  int64_t total = 0, above = 0;
  Race race;
  const Terms term(head.y_max, scale);
  // from terms in units of 2^R to masses
  const int32_t R = 12582912 - static_cast<int32_t>(term.magic);
  const float to_mass = from_bits(static_cast<uint32_t>(127 + R - k_max + kMassBits) << 23);
  float bound = kDraw ? head.bound : 0.0f;
  const uint32_t lane = threadIdx.x % 32;
  for (int32_t batch = begin; batch < end; batch += kThreads * kBatch) {
    Mass all = {0, 0}, better = {0, 0};
    const int32_t batch_end = min(end, batch + kThreads * kBatch);
    // all lanes of a warp stay: tiles are of four
    for (int32_t block = batch; block < batch_end; block += 4 * kPieces * kThreads) {
      const int32_t base = block + 4 * static_cast<int32_t>(threadIdx.x);
      float4 v[kPieces];
      if (block + 4 * kPieces * kThreads <= end) {
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
      uint32_t which = 0, sure = 0, early = 0;
      float s_of[kPieces] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (block + 4 * kThreads * i >= end) break;
        const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
        float e[4];
        uint32_t over = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float y = mul(z[j], scale);
          which |= y >= low && y <= high ? 1u << (4 * i + j) : 0;
          const float x = logits::scaled_exp(fmaxf(y, term.lowest), term.magic), mass = mul(x, to_mass);
          const float t = add(mass, kHigh), u = add(add(mass, -add(t, -kHigh)), kMagic);
          const uint32_t m_high = bits(t) - bits(kHigh);
          const int32_t m_low = static_cast<int32_t>(bits(u)) - kMagicBits;
          all.high += m_high;
          all.low += m_low;
          better.high += y > high ? m_high : 0;
          better.low += y > high ? m_low : 0;
          e[j] = y > high ? x : 0.0f;
          over |= y > high;
        }
        s_of[i] = add(add(e[0], e[1]), add(e[2], e[3]));
        sure |= over;
        if (kDraw && over != 0)
          early |= early_of_four(e, columns.vocab_start + base + 4 * kThreads * i, p.seed, row.key, bound) << (4 * i);
      }
      if (which != 0) append(s.count, list, columns, base, which);
      if (kDraw && early != 0)
        look_at_early(
            columns, term, base, 4 * kThreads, early, p.seed, row.key,
            [&](float z, int32_t column) { return column < end && mul(z, scale) > high; }, bound, race.first);
      if (__any_sync(kAllLanes, sure != 0)) {
        // a tile with a candidate waits for the cut
        uint32_t waits = which | __shfl_xor_sync(kAllLanes, which, 1);
        waits |= __shfl_xor_sync(kAllLanes, waits, 2);
        const float tile = tile_of_lane(s_of);
        race.sum.add_positive((waits >> (4 * (lane & 3)) & 15) != 0 ? 0.0 : static_cast<double>(tile));
      }
    }
    total += (static_cast<int64_t>(all.high) << kHighBits) + all.low;
    above += (static_cast<int64_t>(better.high) << kHighBits) + better.low;
  }

  // into the row's list and sums; the last CTA to come here goes on
  const Words<2> sums = over_block<kWarps>(s.words, Words<2>{{total, above}}, Sum());
  const PartOfRow raced = part_of_row<kWarps>(s.words, race);
  if (threadIdx.x == 0) {
    atomicAdd(&head.total, static_cast<unsigned long long>(sums.x[0]));
    atomicAdd(&head.above, static_cast<unsigned long long>(sums.x[1]));
    work.parts[n * kMostParts + part] = raced;
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

  finish(call, row, head, __ldcg(&head.listed), listed, list, parts, s);
}

}  // namespace

void launch_collect(const SamplingStream& call, cudaStream_t stream) {
  const SamplingRows& p = call.rows;
  const auto kernel = p.draw ? collect_kernel<true> : collect_kernel<false>;
  static OncePerDevice allowed[2];
  allowed[p.draw]([&] {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCollectBytes),
          "shared memory of the sampling kernel");
  });
  const Parts parts = parts_of(p.rows, p.valid, 4 * kThreads, multiprocessor_count());
  launch_behind_shared(kernel, p.rows * parts.count, kThreads, kCollectBytes, stream, call, parts.columns, parts.count);
}

}  // namespace vocabshard::sm90::sampling
