// The token and the truncated sum of a row's columns under a cut that is known.
#pragma once

#include <cfloat>

#include "sm90/sampling_stream.cuh"

namespace vocabshard::sm90::sampling {

// Terms of a row whose largest y this is: see logits_share.cuh.
struct Terms {
  float magic, lowest, lowest_kept, scale;

  VS_DEVICE Terms(float y_max, float scale) : scale(scale) {
    const int32_t R = 32 * limb_top(exp_k(clamp_logit(y_max))) - logits::kOffset;
    magic = static_cast<float>(12582912 - R);
    lowest = mul(static_cast<float>(R + logits::kLowest), logits::kLn2f);
    lowest_kept = fmaxf(lowest, -kLogitLimit);  // finite logits below -2^20 count as -2^20
  }
  // A kept z is finite.
  VS_DEVICE float operator()(float z, bool kept) const {
    return logits::scaled_exp(kept ? fmaxf(mul(z, scale), lowest_kept) : lowest, magic);
  }
};

struct Race {
  Words<2> first;  // arrival, who
  logits::Counters sum;

  VS_DEVICE Race() : first({{kNoArrival, kNobody}}) { sum.clear(); }
};

// Equals of the cut past the `last` of a piece.
VS_DEVICE void leave_out(float4& v, float cut_z, int32_t last) {
  v.x = v.x == cut_z && 0 > last ? neg_inf() : v.x;
  v.y = v.y == cut_z && 1 > last ? neg_inf() : v.y;
  v.z = v.z == cut_z && 2 > last ? neg_inf() : v.z;
  v.w = v.w == cut_z && 3 > last ? neg_inf() : v.w;
}

struct Look {
  int64_t arrival;
  float clock;
};

// Rarely wanted: out of line.
static __device__ __noinline__ Look look_at(float y, int64_t id, uint32_t word, int64_t seed, int64_t row_key) {
  const float clock = clock_at(word, id, seed, row_key);
  return {arrival_of(clock, y), clock};
}

// This thread's share of columns [begin, end), begin a multiple of 512, of a CTA of `warps`.
//
// E >= log2(e) x / 2^32, so that a column comes first only where x / 2^32 is at most ln 2 E' e^(y - y'), E' and y'
// those of the earliest so far: compared by approximation with a quarter to spare; the term is there already as e^y.
template <bool kDraw>
VS_DEVICE void race_over(const SamplingStream& call, int64_t n, const Columns& columns, const Head& head, int64_t cut,
                         int32_t begin, int32_t end, int32_t warps, Race& race) {
  const SamplingRows& p = call.rows;
  const float scale = scale_of(p, n), y_max = head.y_max;
  const Terms term(y_max, scale);
  const float cut_z = fmaxf(cut_logit(cut), -FLT_MAX);  // -inf has no term and does not race
  const int32_t tie = static_cast<int32_t>(
      min(max(cut_tie(cut) - columns.vocab_start, int64_t{-1}), static_cast<int64_t>(columns.valid)));
  const bool split = tie < columns.valid;
  const int64_t row_key = kDraw ? p.row_keys[n] : 0;
  float bound = from_bits(0x7f800000u);
  if (kDraw && head.arrival != kNoArrival) {
    const float z = logit_of(static_cast<int32_t>(static_cast<uint32_t>(head.who)));
    if (place_of(z, head.who >> 32) >= cut) {
      race.first = {{head.arrival, head.who}};
      bound = fmaxf(__fdividef(head.factor, logits::scaled_exp(y_max, term.magic)), 1e-37f);
    }
  }
  const int32_t lane = threadIdx.x % 32;
  for (int32_t base = begin + 512 * static_cast<int32_t>(threadIdx.x / 32); base < end; base += 512 * warps) {
    float4 v[4];
    if (base + 512 <= columns.valid) {
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = *reinterpret_cast<const float4*>(columns.row + base + 128 * j + 4 * lane);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = columns.four(base + 128 * j + 4 * lane);
    }
    if (split) {
#pragma unroll
      for (int j = 0; j < 4; ++j) leave_out(v[j], cut_z, tie - (base + 128 * j + 4 * lane));
    }
    const float most = fmaxf(fmaxf(largest(v[0]), largest(v[1])), fmaxf(largest(v[2]), largest(v[3])));
    if (!__any_sync(kAllLanes, most >= cut_z)) continue;
    float s[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float z[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
      const int32_t at = base + 128 * j + 4 * lane;
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) e[i] = term(z[i], z[i] >= cut_z);
      s[j] = add(add(e[0], e[1]), add(e[2], e[3]));
      if (kDraw && largest(v[j]) >= cut_z) {
        const Philox words = column_words((columns.vocab_start + at) >> 2, 0, p.seed, row_key);
        bool early[4], some = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // 1 + x / 2^32, rounded down to 23 bits
          early[i] = from_bits(words.word[i] >> 9 | 0x3f800000u) <= fma(e[i], bound, 1.0000005f);
          some |= early[i];
        }
        if (some) {
#pragma unroll 1
          for (int i = 0; i < 4; ++i) {
            const float x = i == 0 ? z[0] : i == 1 ? z[1] : i == 2 ? z[2] : z[3];
            const float weight = i == 0 ? e[0] : i == 1 ? e[1] : i == 2 ? e[2] : e[3];
            const bool first = i == 0 ? early[0] : i == 1 ? early[1] : i == 2 ? early[2] : early[3];
            if (!first || !(x >= cut_z)) continue;
            const int64_t id = columns.vocab_start + at + i;
            const Look look = look_at(clamp_logit(mul(x, scale)), id, word_of(words, i), p.seed, row_key);
            race.first = Smaller()(race.first, Words<2>{{look.arrival, who_is(id, x)}});
            bound = fminf(bound, fmaxf(__fdividef(mul(look.clock, kPassShare), weight), 1e-37f));
          }
        }
      }
    }
    // four tiles of four lanes each: a tile for every lane
    const bool odd = lane & 1, upper = lane & 2;
    float a = odd ? s[1] : s[0], b = odd ? s[3] : s[2];
    a = add(a, __shfl_xor_sync(kAllLanes, odd ? s[0] : s[1], 1));
    b = add(b, __shfl_xor_sync(kAllLanes, odd ? s[2] : s[3], 1));
    const float tile = add(upper ? b : a, __shfl_xor_sync(kAllLanes, upper ? a : b, 2));
    race.sum.add_positive(static_cast<double>(tile));
  }
}

// Of all threads of a CTA.
template <int kWarps>
VS_DEVICE PartOfRow part_of_row(int64_t (*words)[kLimbs], const Race& race) {
  Words<kLimbs> sums;
  race.sum.get(sums.x);
  sums = over_block<kWarps>(words, sums, Sum());
  const Words<2> first = over_block<kWarps>(words, race.first, Smaller());
  return {first.x[0], first.x[1], {sums.x[0], sums.x[1], sums.x[2]}, 0};
}

}  // namespace vocabshard::sm90::sampling
