// Rows under one top_p (sampling_stream.h): a cluster of CTAs a row, each with a slice of its columns.
//
// A histogram of a sample of the columns tells between which two y the last kept column lies. Then every column is read
// once: masses are summed exactly, what is above is kept for sure, and raced and summed at once, what lies between is
// listed. The cluster finds the cut among the listed, and races and sums those.
//
// Where the maxima of groups say that few of them can have what is kept, the first CTA does all, from the columns of
// these alone.
//
// As in sampling_list.cu a made-up row has the code fetched while the forward still runs.
#include <cooperative_groups.h>

#include "sm90/launch.h"
#include "sm90/sampling_grids.h"
#include "sm90/sampling_maxima.cuh"

namespace vocabshard::sm90::sampling {

namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = kFewThreads, kWarps = kThreads / 32;
constexpr int kPieces = 4;                       // float4s that a thread loads at once
constexpr int kDepths = 4096, kDepthShift = 14;  // bins of depth d = y_max - y, by the bits of d + 1: 512 an octave
constexpr float kSigmas = 4.0f, kBias = 0.004f;  // of an estimated mass; a quarter of a bin's width
constexpr float kUnseen = 10.0f;                 // times the stride: as many columns the sample does not miss
constexpr int kPlaceBits = 9, kPlaceBins = 1 << kPlaceBits;
constexpr int kOwnListed = 1664, kFew = 128;  // places of a CTA's list; of a row that are compared with each other
constexpr int kPeakedGroups = 192;
constexpr int kRowsOfWide = 6;        // clusters of 16 CTAs, for each of which a GPC needs to have room
constexpr int kBatch = 32 * kPieces;  // columns of a thread whose masses fit into 32 bits
constexpr int kHighBits = 18;         // of a mass, below its high part
constexpr float kHigh = 0x1p+41f;     // one unit in its last place is 2^kHighBits

struct Sums {
  float mass, squares;
};

// Of one CTA. What others read is written between two cluster_sync.
struct Shared {
  union {
    uint32_t depths[kDepths];
    struct {
      Bin bins[kPlaceBins];
      int64_t list[kOwnListed];
    };
  };
  int64_t few[kFew], few_mass[kFew];  // of the row, in the first CTA
  int64_t words[kWarps][kLimbs];
  Sums of_warp[kWarps];
  Partial partials[kWarps];
  // for others
  Sums sums;
  int64_t best;
  int32_t deep, shallow;
  int64_t total, above, range;
  int32_t lowest, highest;  // order of the listed
  uint32_t count;           // of the listed; more than kOwnListed: not all are
  PartOfRow part;
  // from others
  int32_t found_bin;
  uint32_t found_count, few_count;
  int64_t found_above, answer;
  bool behind, early;
  float bound;
};
static_assert(sizeof(Shared) <= 25 << 10, "a CTA of the forward for few rows leaves 26 KiB");

VS_DEVICE void cluster_sync() { cg::this_cluster().sync(); }
template <class T>
VS_DEVICE T* of_rank(T* mine, int rank) {
  return cg::this_cluster().map_shared_rank(mine, rank);
}

VS_DEVICE float depth_of(int32_t bin) {
  return add(from_bits(0x3f800000u + (static_cast<uint32_t>(bin) << kDepthShift)), -1.0f);
}
VS_DEVICE int32_t bin_of(float depth) {
  return min(static_cast<int32_t>((bits(add(fmaxf(depth, 0.0f), 1.0f)) - 0x3f800000u) >> kDepthShift), kDepths - 1);
}
VS_DEVICE float weight_at(float depth) { return ptx::exp2(-mul(depth, kLog2e)); }

// The sum of exponentials in units of e^y_max.
VS_DEVICE float total_of(const Partial& p) {
  const int32_t k_max = exp_k(clamp_logit(p.y_max)), n = 32 * (limb_top(k_max) - 1) - k_max;
  const double unit = from_bits(static_cast<uint64_t>(1023 + n) << 52);
  return static_cast<float>(mul(counters_value(p.c), unit)) / exp_split(clamp_logit(p.y_max)).p;
}

// What a CTA has of a row.
struct Slice {
  Row row;  // of these columns alone
  float y_max;
  int32_t k_max;
  int rank;
};

VS_DEVICE int64_t mass_of_place(const Slice& slice, int64_t place) {
  return mass_fast(mul(logit_of(static_cast<int32_t>(place >> 32)), slice.row.scale), slice.k_max);
}

// y of candidates, and a bound of terms for who may still come first.
struct Bracket {
  float low, high, bound;
};

// `rest`: how much is left out, in units of e^y_max. One sector of `stride` is looked at.
template <int kCtas>
VS_DEVICE Bracket bracket_of(const SamplingRows& p, const Slice& slice, int32_t stride, float rest, Shared& s) {
  const Columns columns = slice.row.columns;
  const float scale = slice.row.scale, y_max = slice.y_max;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = 4 * threadIdx.x; i < kDepths; i += 4 * kThreads)
    *reinterpret_cast<uint4*>(s.depths + i) = make_uint4(0, 0, 0, 0);
  if (threadIdx.x == 0) s.deep = kDepths - 1, s.shallow = 0;
  __syncthreads();
  const int32_t strata = (columns.valid + 8 * stride - 1) / (8 * stride), pieces = 2 * strata;
  float best = neg_inf();
  int32_t best_at = 0;
#pragma unroll 1
  for (int32_t base = threadIdx.x; base < pieces; base += kPieces * kThreads) {
    float4 v[kPieces];
    int32_t at[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int32_t piece = base + kThreads * i, stratum = piece / 2;
      const auto jitter = static_cast<int32_t>((static_cast<uint32_t>(stratum) * 0x9e3779b1u) >> 20) & (stride - 1);
      at[i] = piece < pieces ? 8 * (stratum * stride + jitter) + 4 * (piece & 1) : columns.valid;
      v[i] = columns.four(at[i]);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float z[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (is_neg_inf(z[j])) continue;
        atomicAdd(&s.depths[bin_of(add(y_max, -mul(z[j], scale)))], 1u);
        if (z[j] > best) best = z[j], best_at = at[i] + j;
      }
    }
  }
  const int64_t place = is_neg_inf(best) ? kKeepAll : place_of(best, columns.vocab_start + best_at);
  const int64_t of_block = over_block<kWarps>(s.words, Words<1>{{place}}, Larger()).x[0];
  if (threadIdx.x == 0) s.best = of_block;
  cluster_sync();

  // from the deepest bin up, some of them by each CTA, and of these some by each thread
  constexpr int kOwn = kDepths / kCtas / kThreads;
  const int32_t first = kDepths - 1 - kOwn * (kThreads * slice.rank + static_cast<int32_t>(threadIdx.x));
  uint32_t counts[kOwn] = {};
#pragma unroll 4
  for (int rank = 0; rank < kCtas; ++rank) {
    const uint32_t* const depths = of_rank(s.depths, rank);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) counts[i] += depths[first - i];
  }
  const auto weight_of = [](int32_t bin) { return weight_at(mul(add(depth_of(bin), depth_of(bin + 1)), 0.5f)); };
  Sums mine = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float w = weight_of(first - i), mass = static_cast<float>(counts[i]) * w;
    mine.mass += mass;
    mine.squares += mass * w;
  }
  Sums before = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float mass = __shfl_up_sync(kAllLanes, before.mass, step);
    const float squares = __shfl_up_sync(kAllLanes, before.squares, step);
    if (lane >= step) before.mass += mass, before.squares += squares;
  }
  if (lane == 31) s.of_warp[warp] = before;
  before.mass -= mine.mass, before.squares -= mine.squares;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before.mass += s.of_warp[w].mass, before.squares += s.of_warp[w].squares;
    if (threadIdx.x == kThreads - 1 && w == kWarps - 1)
      s.sums = {before.mass + mine.mass, before.squares + mine.squares};
  }
  cluster_sync();
  Sums deeper = lane < slice.rank ? *of_rank(&s.sums, lane % kCtas) : Sums{0.0f, 0.0f};
  int64_t best_of_row = lane < kCtas ? *of_rank(&s.best, lane % kCtas) : kKeepAll;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    deeper.mass += __shfl_xor_sync(kAllLanes, deeper.mass, step);
    deeper.squares += __shfl_xor_sync(kAllLanes, deeper.squares, step);
    best_of_row = max(best_of_row, __shfl_xor_sync(kAllLanes, best_of_row, step));
  }
  before.mass += deeper.mass, before.squares += deeper.squares;
  const auto each = static_cast<float>(stride);
  int32_t shallow = 0, deep = kDepths - 1;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int32_t bin = first - i;
    const float w = weight_of(bin), mass = static_cast<float>(counts[i]) * w, below = each * before.mass;
    const float error = kSigmas * each * sqrtf(fmaxf(before.squares, 0.0f) * (1.0f - 1.0f / each));
    const float unseen = stride > 1 ? kUnseen * each * weight_at(depth_of(bin)) : 0.0f;
    if (below * (1.0f + kBias) + error + unseen <= rest) deep = min(deep, bin);
    if (below * (1.0f - kBias) - error > rest) shallow = max(shallow, bin + 1);  // too much is deeper
    before.mass += mass;
    before.squares += mass * w;
  }
  deep = __reduce_min_sync(kAllLanes, deep);
  shallow = __reduce_max_sync(kAllLanes, shallow);
  if (lane == 0) {
    atomicMin(&s.deep, deep);
    atomicMax(&s.shallow, shallow);
  }
  cluster_sync();
  deep = __reduce_min_sync(kAllLanes, *of_rank(&s.deep, lane % kCtas));
  shallow = __reduce_max_sync(kAllLanes, *of_rank(&s.shallow, lane % kCtas));

  const float depth = depth_of(deep + 1), slack = (fabsf(y_max) + depth) * 0x1p-21f;
  Bracket bracket;
  bracket.low = deep == kDepths - 1 ? -FLT_MAX : y_max - depth - slack;  // -inf is no candidate
  bracket.high = shallow == 0 ? -neg_inf() : y_max - depth_of(shallow) + slack;
  if (p.draw) {
    if (threadIdx.x == 0) {
      const float z = logit_of(static_cast<int32_t>(best_of_row >> 32)), y = mul(z, scale);
      s.bound = from_bits(0x7f800000u);
      if (best_of_row != kKeepAll && y > bracket.high) {
        const int64_t id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(best_of_row));
        const float clock = clock_at(column_word(id, 0, p.seed, slice.row.key), id, p.seed, slice.row.key);
        s.bound = bound_of(clock, Terms(y_max, scale)(z, true));
      }
    }
    __syncthreads();
    bracket.bound = s.bound;
  }
  return bracket;
}

// Masses of a thread's columns: their high parts, and what is left, rounded to the nearest integer.
struct Mass {
  uint32_t high;
  int32_t low;

  VS_DEVICE int64_t whole() const { return (static_cast<int64_t>(high) << kHighBits) + low; }
};

// One read of the slice: s.list, s.total, s.above, and what is above the bracket in `race`.
template <bool kDraw>
VS_DEVICE void collect(const SamplingRows& p, const Slice& slice, const Bracket& bracket, Race& race, Shared& s) {
  const Columns columns = slice.row.columns;
  const float scale = slice.row.scale, low = bracket.low, high = bracket.high;
  const Terms term(slice.y_max, scale);
  // from terms in units of 2^R to masses
  const int32_t R = 12582912 - static_cast<int32_t>(term.magic);
  const float to_mass = from_bits(static_cast<uint32_t>(127 + R - slice.k_max + kMassBits) << 23);
  float bound = bracket.bound;
  const uint32_t lane = threadIdx.x % 32;
  int64_t total = 0, above = 0;
  int32_t lowest = INT32_MAX, highest = INT32_MIN;
#pragma unroll 1
  for (int32_t batch = 0; batch < columns.valid; batch += kThreads * kBatch) {
    Mass all = {0, 0}, better = {0, 0};
    const int32_t batch_end = min(columns.valid, batch + kThreads * kBatch);
    // all lanes of a warp stay: tiles are of four
#pragma unroll 1
    for (int32_t block = batch; block < batch_end; block += 4 * kPieces * kThreads) {
      const int32_t base = block + 4 * static_cast<int32_t>(threadIdx.x);
      float4 v[kPieces];
      if (block + 4 * kPieces * kThreads <= columns.valid) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          v[i] = *reinterpret_cast<const float4*>(columns.row + base + 4 * kThreads * i);
      } else {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) v[i] = columns.four(base + 4 * kThreads * i);
      }
      uint32_t which = 0, sure = 0, early = 0;
      float s_of[kPieces] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (block + 4 * kThreads * i >= columns.valid) break;
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
          early |= early_of_four(e, columns.vocab_start + base + 4 * kThreads * i, p.seed, slice.row.key, bound)
                   << (4 * i);
      }
      if (which != 0) {
        uint32_t to = atomicAdd(&s.count, static_cast<uint32_t>(__popc(which)));
#pragma unroll 1
        for (uint32_t left = which; left != 0; left &= left - 1, ++to) {
          const int32_t bit = __ffs(static_cast<int>(left)) - 1, column = base + 4 * kThreads * (bit / 4) + bit % 4;
          const int64_t place = place_of(columns.row[column], columns.vocab_start + column);
          lowest = min(lowest, static_cast<int32_t>(place >> 32));
          highest = max(highest, static_cast<int32_t>(place >> 32));
          if (to < kOwnListed) s.list[to] = place;
        }
      }
      if (kDraw && early != 0)
        look_at_early(
            columns, term, base, 4 * kThreads, early, p.seed, slice.row.key,
            [&](float z, int32_t) { return mul(z, scale) > high; }, bound, race.first);
      if (__any_sync(kAllLanes, sure != 0)) {
        // a tile with a candidate waits for the cut
        uint32_t waits = which | __shfl_xor_sync(kAllLanes, which, 1);
        waits |= __shfl_xor_sync(kAllLanes, waits, 2);
        const float tile = tile_of_lane(s_of);
        race.sum.add_positive((waits >> (4 * (lane & 3)) & 15) != 0 ? 0.0 : static_cast<double>(tile));
      }
    }
    total += all.whole();
    above += better.whole();
  }
  const Words<2> sums = over_block<kWarps>(s.words, Words<2>{{total, above}}, Sum());
  lowest = __reduce_min_sync(kAllLanes, lowest);
  highest = __reduce_max_sync(kAllLanes, highest);
  if (lane == 0) {
    atomicMin(&s.lowest, lowest);
    atomicMax(&s.highest, highest);
  }
  if (threadIdx.x == 0) s.total = sums.x[0], s.above = sums.x[1];
}

// A CTA's part of what the crossing is looked for in.
struct Own {
  const int64_t* places;
  int32_t count;

  template <class Take>
  VS_DEVICE void each(const Take& take) const {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < count; i += kThreads) take(places[i]);
  }
};
struct All {
  Columns columns;

  template <class Take>
  VS_DEVICE void each(const Take& take) const {
#pragma unroll 1
    for (int32_t at = 4 * threadIdx.x; at < columns.valid; at += 4 * kThreads) {
      const float4 v = columns.four(at);
      const float z[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (at + j < columns.valid) take(place_of(z[j], columns.vocab_start + at + j));
    }
  }
};

// The cut at the place in [low, high], best first, at which `wanted` masses are reached; false: none. By all CTAs.
template <int kCtas, class Source>
VS_DEVICE bool find_cut(const Source& source, const Slice& slice, int64_t wanted, int64_t low, int64_t high,
                        int64_t& cut, Shared& s) {
  const int32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t left = kFew + 1; left > kFew;) {
    const uint64_t width = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    const int shift = max(0, 64 - kPlaceBits - __clzll(static_cast<int64_t>(width)));
    for (int i = threadIdx.x; i < kPlaceBins; i += kThreads)
      *reinterpret_cast<uint4*>(&s.bins[i]) = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) s.found_bin = -1, s.few_count = 0, s.behind = false;
    __syncthreads();
    source.each([&](int64_t place) {
      if (place < low || place > high) return;
      const uint64_t depth = static_cast<uint64_t>(high) - static_cast<uint64_t>(place);
      add_to(s.bins[depth >> shift], 1, true, mass_of_place(slice, place));
    });
    cluster_sync();
    // some bins by each CTA
    constexpr int kOwn = kPlaceBins / kCtas;
    static_assert(kOwn <= kThreads);
    const int32_t bin = kOwn * slice.rank + static_cast<int32_t>(threadIdx.x);
    uint32_t count = 0;
    int64_t mass = 0;
    if (threadIdx.x < kOwn) {
#pragma unroll 4
      for (int rank = 0; rank < kCtas; ++rank) {
        const uint4 words = *reinterpret_cast<const uint4*>(of_rank(&s.bins[bin], rank));
        count += words.x;
        mass += whole_mass({words.x, {words.y, words.z, words.w}});
      }
    }
    int64_t up_to = up_to_thread<kWarps>(s.words, mass);
    if (threadIdx.x == kThreads - 1) s.range = up_to;
    cluster_sync();
    int64_t before = lane < slice.rank ? *of_rank(&s.range, lane % kCtas) : 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(kAllLanes, before, step);
    up_to += before;
    if (up_to - mass < wanted && wanted <= up_to) {
      for (int rank = 0; rank < kCtas; ++rank) {
        Shared& to = *of_rank(&s, rank);
        to.found_bin = bin, to.found_count = count, to.found_above = up_to - mass;
      }
    }
    cluster_sync();
    if (s.found_bin < 0) return false;
    left = s.found_count;
    wanted -= s.found_above;
    high -= static_cast<int64_t>(static_cast<uint64_t>(s.found_bin) << shift);
    if (static_cast<uint64_t>(high) - static_cast<uint64_t>(low) >> shift != 0)
      low = high - static_cast<int64_t>((uint64_t{1} << shift) - 1);
    __syncthreads();  // read by all before it is written again
  }
  Shared& first = *of_rank(&s, 0);
  source.each([&](int64_t place) {
    if (place < low || place > high) return;
    const uint32_t to = atomicAdd(&first.few_count, 1u);
    first.few[to] = place;
    first.few_mass[to] = mass_of_place(slice, place);
  });
  cluster_sync();
  if (slice.rank == 0) {
    const auto count = static_cast<int32_t>(s.few_count);
    if (threadIdx.x < count) {
      const int64_t mine = s.few[threadIdx.x];
      int64_t above = 0;
#pragma unroll 4
      for (int32_t i = 0; i < count; ++i) above += s.few[i] > mine ? s.few_mass[i] : 0;
      if (above < wanted && wanted <= above + s.few_mass[threadIdx.x])
        for (int rank = 0; rank < kCtas; ++rank) of_rank(&s, rank)->answer = mine;
    }
  }
  cluster_sync();
  cut = s.answer;
  bool behind = false;  // equals that are left out
  source.each([&](int64_t other) { behind |= other >> 32 == cut >> 32 && other < cut; });
  if (__syncthreads_or(behind) && threadIdx.x < kCtas) of_rank(&s, threadIdx.x)->behind = true;
  cluster_sync();
  if (!s.behind) cut &= ~int64_t{0xffffffff};
  return true;
}

// What waited for the cut.
template <bool kDraw>
VS_DEVICE void finish(const SamplingRows& p, const Slice& slice, const Bracket& bracket, int64_t cut, Race& race,
                      const Shared& s) {
  const Columns& columns = slice.row.columns;
  const Terms term(slice.y_max, slice.row.scale);
  const float cut_z = fmaxf(cut_logit(cut), -FLT_MAX);  // -inf has no term
  const int32_t tie = last_equal(cut, columns);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < s.count; i += kThreads) {
    const int64_t place = s.list[i];
    add_tile_of(columns, term, cut_z, tie, place, race.sum, [&](float z, int32_t) {
      const float y = mul(z, term.scale);
      return y >= bracket.low && y <= bracket.high;
    });
    if (place < cut || !kDraw) continue;
    const float z = logit_of(static_cast<int32_t>(place >> 32));
    const int64_t id = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place));
    if (!is_early(column_word(id, 0, p.seed, slice.row.key), term(z, true), bracket.bound)) continue;
    const Look look = look_at(clamp_logit(mul(z, term.scale)), id, p.seed, slice.row.key);
    race.first = Smaller()(race.first, Words<2>{{look.arrival, who_is(id, z)}});
  }
}

VS_DEVICE Words<2> range_of(int32_t lowest, int32_t highest) {
  return {{static_cast<int64_t>(lowest) * (int64_t{1} << 32),
           static_cast<int64_t>(highest) * (int64_t{1} << 32) + 0xffffffff}};
}

// Where the list is of no use: the crossing is elsewhere, or there are too many equals.
template <int kCtas>
__device__ __noinline__ int64_t cut_of_all(const Slice& slice, int64_t share, Shared& s) {
  const All source = {slice.row.columns};
  int64_t total = 0, cut = kKeepAll;
  source.each([&](int64_t place) { total += mass_of_place(slice, place); });
  total = over_block<kWarps>(s.words, Words<1>{{total}}, Sum()).x[0];
  if (threadIdx.x == 0) s.total = total;
  cluster_sync();
  const int32_t lane = threadIdx.x % 32;
  Words<1> all = {{lane < kCtas ? *of_rank(&s.total, lane % kCtas) : 0}};
#pragma unroll
  for (int step = 16; step > 0; step /= 2) all = Sum()(all, of_lane(all, step));
  const Words<2> range = range_of(order_of(neg_inf()), order_of(-neg_inf()));
  find_cut<kCtas>(source, slice, share_of(share, all.x[0]), range.x[0], range.x[1], cut, s);
  return cut;
}

// rest: what is left out, in units of e^y_max.
template <int kCtas, bool kDraw>
VS_DEVICE void run(const SamplingStream& call, const Row& whole_row, const Slice& slice, int32_t stride, float rest,
                   Shared& s) {
  const SamplingRows& p = call.rows;
  const int32_t lane = threadIdx.x % 32;
  const Bracket bracket = bracket_of<kCtas>(p, slice, stride, rest, s);
  if (threadIdx.x == 0) s.count = 0, s.lowest = INT32_MAX, s.highest = INT32_MIN;
  __syncthreads();
  Race race;
  collect<kDraw>(p, slice, bracket, race, s);
  cluster_sync();
  Words<2> sums = {{0, 0}};
  int32_t lowest = INT32_MAX, highest = INT32_MIN;
  bool listed = true;
  if (lane < kCtas) {
    const Shared& other = *of_rank(&s, lane);
    sums = {{other.total, other.above}};
    lowest = other.lowest, highest = other.highest;
    listed = other.count <= kOwnListed;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sums = Sum()(sums, of_lane(sums, step));
  lowest = __reduce_min_sync(kAllLanes, lowest);
  highest = __reduce_max_sync(kAllLanes, highest);
  // where logits are clamped, masses need more care than `collect` takes
  listed = __all_sync(kAllLanes, listed) && slice.y_max >= -kLogitLimit + 256.0f;

  const int64_t wanted = share_of(p.step[0].number, sums.x[0]);
  int64_t cut;
  const Words<2> range = range_of(lowest, highest);
  if (listed && wanted > sums.x[1] &&
      find_cut<kCtas>(Own{s.list, static_cast<int32_t>(s.count)}, slice, wanted - sums.x[1], range.x[0], range.x[1],
                      cut, s)) {
    finish<kDraw>(p, slice, bracket, cut, race, s);
  } else {
    race = Race();
    cut = cut_of_all<kCtas>(slice, p.step[0].number, s);
    race_over<kDraw>(p, slice.row, slice.y_max, cut, kWarps, race);
  }
  const PartOfRow part = part_of_row<kWarps>(s.words, race);
  if (threadIdx.x == 0) s.part = part;
  cluster_sync();
  if (slice.rank == 0 && threadIdx.x < 32) {
    PartOfRow whole = {kNoArrival, kNobody, {0, 0, 0}, 0};
    if (lane < kCtas) whole = of_rank(&s, lane)->part;
    Words<2> first = whole.first();
    Words<kLimbs> sum = {{whole.c[0], whole.c[1], whole.c[2]}};
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      first = Smaller()(first, of_lane(first, step));
      sum = Sum()(sum, of_lane(sum, step));
    }
    whole = {first.x[0], first.x[1], {sum.x[0], sum.x[1], sum.x[2]}, 0};
    if (lane == 0) put_row(call, whole_row, cut, first, whole.partial(slice.y_max));
  }
  cluster_sync();  // nobody leaves before it has been read
}

// Of a row of which few groups are read, by the first CTA. False: it is not one, or that does not tell.
template <int kCtas>
VS_DEVICE bool finish_peaked(const SamplingStream& call, const Row& row, const Partial& uncut, const float* of_groups,
                             float total, float left_out, int rank, FewShared& s) {
  const float y_max = uncut.y_max;
  if (y_max < -kLogitLimit + 256.0f) return false;
  Maxima maxima(of_groups, (row.columns.valid + kMaximaColumns - 1) / kMaximaColumns);
  const float low = bound_of_rest(maxima, row.scale, y_max, total * left_out, kPeakedGroups, s);
  if (low == -FLT_MAX) return false;
  if (rank == 0) {
    // tiles are rounded four times each, masses once, and this some times
    const double mass = static_cast<double>(total) * static_cast<double>(exp_split(clamp_logit(y_max)).p);
    const Total all = {static_cast<int64_t>(mass * (0x1p+40 - 0x1p+20)),
                       static_cast<int64_t>(mass * (0x1p+40 + 0x1p+20))};
    int64_t* const list = Workspace(call.workspace, call.rows.rows).candidates + row.n * kListed;
    const uint32_t count = list_columns(row, list_groups(maxima, row.scale, low, s), low, list, s);
    const bool done = count <= kFewPlaces ? finish_few(call, row, y_max, static_cast<int32_t>(count), all, s)
                                          : finish_row(call, row, y_max, low, count, list, all, s);
    if (threadIdx.x < kCtas) of_rank(&s, threadIdx.x)->last = done;
  }
  cluster_sync();
  const bool done = s.last;
  cluster_sync();
  return done;
}

// A row of a tile for every CTA, of which e^0 and 15 e^-2 are added up.
struct MadeUp {
  float z[16 * kTile], maxima[16 * kTile / kMaximaColumns];

  constexpr MadeUp() : z(), maxima() {
    for (int i = 0; i < 16 * kTile; ++i) z[i] = i % kTile == 0 ? 0.0f : -2.0f;
  }
};
__device__ const MadeUp made_up;
constexpr float kMadeUpTile = 3.03f;

template <int kCtas, bool kDraw>
__global__ void __launch_bounds__(kThreads, 6)
    top_p_kernel(const __grid_constant__ SamplingStream call, int32_t part_columns, int32_t stride, float left_out) {
  __shared__ union {
    FewShared few;
    Shared many;
  } s;
  const SamplingRows& p = call.rows;
  const int64_t n = blockIdx.x / kCtas;
  const auto rank = static_cast<int>(cg::this_cluster().block_rank());
  const Workspace work(call.workspace, p.rows);
  ptx::grid_launch_next();
  if (rank == 0 && threadIdx.x < kCtas) *of_rank(&s.many.early, threadIdx.x) = call.maxima_there && work.early();
  cluster_sync();
  const int first_pass = s.many.early ? 0 : 1;
  cluster_sync();
#pragma unroll 1
  for (int pass = first_pass; pass < 2; ++pass) {
    const bool real = pass == 1;
    int32_t begin = kTile * rank, each = kTile;
    Row row = {n, {made_up.z, kTile * kCtas, 0}, 1.0f, 0, false};
    Partial uncut = {};
    if (real) {
      ptx::grid_wait();
      row = row_of(p, n);
      uncut = uncut_of<kThreads>(call, n, s.many.partials);
      begin = min(part_columns * rank, row.columns.valid), each = min(part_columns, row.columns.valid - begin);
    }
    if (!usable(row, uncut.y_max)) {  // nobody of the cluster waits
      if (rank == 0 && threadIdx.x == 0) put_row(call, row, kKeepAll, {{kNoArrival, kNobody}}, uncut);
      return;
    }
    Slice slice = {row, uncut.y_max, exp_k(clamp_logit(uncut.y_max)), rank};
    slice.row.columns = {row.columns.row + begin, each, row.columns.vocab_start + begin};
    const float total = real ? total_of(uncut) : kMadeUpTile * kCtas;
    if (call.maxima_there) {
      const float* const of_groups = real ? work.maxima + n * kRowMaxima : made_up.maxima;
      // of the made-up row one column of each tile is to be kept
      const bool done =
          finish_peaked<kCtas>(call, row, uncut, of_groups, real ? total : kCtas, real ? left_out : 3.0f, rank, s.few);
      if (done && real) return;
    }
    __syncthreads();
    run<kCtas, kDraw>(call, row, slice, real ? stride : 1, total * left_out, s.many);
  }
}

template <int kCtas, bool kDraw>
void launch(const SamplingStream& call, cudaStream_t stream) {
  const SamplingRows& p = call.rows;
  constexpr auto kernel = top_p_kernel<kCtas, kDraw>;
  static OncePerDevice once;
  once([&] {  // as the forward has it: an SM that is to be set otherwise must run empty first
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
          "shared memory of the sampling kernel");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "cluster of the sampling kernel");
  });
  const int64_t granules = (p.valid + 4 * kThreads - 1) / (4 * kThreads);
  const auto part_columns = static_cast<int32_t>((granules + kCtas - 1) / kCtas * 4 * kThreads);
  int32_t stride = 1;
  while (stride < 4 && p.valid > 65536 * stride) stride *= 2;
  const auto left_out = static_cast<float>(1.0 - static_cast<double>(p.step[0].number) * 0x1p-30);
  launch_grid_of_clusters(kernel, p.rows * kCtas, kThreads, 0, kCtas, stream, call, part_columns, stride, left_out);
}

}  // namespace

void launch_top_p(const SamplingStream& call, cudaStream_t stream) {
  const SamplingRows& p = call.rows;
  if (p.rows <= kRowsOfWide)
    p.draw ? launch<16, true>(call, stream) : launch<16, false>(call, stream);
  else
    p.draw ? launch<8, true>(call, stream) : launch<8, false>(call, stream);
}

}  // namespace vocabshard::sm90::sampling
