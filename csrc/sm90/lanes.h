// One lane's part of a row's partial: contract.h's partial_add_tile for the columns a lane owns, with its bytes but
// fewer instructions. All columns share one K (the row's maximum so far) and one magic constant; what contract.h drops
// by selection is clamped to a term that lies below every counter.
#pragma once

#include "contract.h"
#include "sm90/entropy_sum.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

// A lane's counters of one row in shared memory: word w at [w * 32 + lane]. The row's maximum is kept once, it is the
// same for the four lanes of its quad.
template <bool kEntropy>
constexpr int kLaneWords = kEntropy ? 2 * kLimbs : kLimbs;

// What the terms of some columns are computed against: K, and the clamp that stands for "dropped".
struct Scale {
  int32_t K;
  float magic;  // kMagic + kScale - K: rounds y c to k and leaves k - K + kScale in the low bits
  float low;    // k here is K - 199 or K - 198: below kSpan, and normal after scaling
};

// y_max as it is: -inf and NaN give some K, and counters that come to nothing.
VS_DEVICE Scale make_scale(float y_max) {
  const float v = fmaxf(y_max, -kLogitLimit);
  const float t = fma(v, kLog2e, kMagic);
  // 2 kMagic + kScale - t is an integer below 2^24, and exact
  return {static_cast<int32_t>(bits(t) - static_cast<uint32_t>(kMagicBits)), add(2.0f * kMagic + kScale, -t),
          add(v, -137.5f)};
}

// A tile's own maximum can be near -2^20 only where the row's is, or where it comes to nothing. There the clamp of
// contract.h (finite logits count as -2^20) differs from `low`: rare, and done beforehand.
constexpr float kNearLimitFrom = -kLogitLimit + 256.0f;
// In place: in this rare branch no register may change.
VS_DEVICE void clamp_finite(float& y) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.gt.f32 p, %0, 0fff800000;\nsetp.lt.and.f32 p, %0, 0fc9800000, p;\n"
      "@p mov.f32 %0, 0fc9800000;\n}"
      : "+f"(y));
}

VS_DEVICE float scaled_term(float y, const Scale& s) {
  const float t = fma(y, kLog2e, s.magic);
  const float f = fma(y, kLog2e, add(s.magic, -t));
  return from_bits(bits(exp_poly(f)) + (bits(t) << 23));  // kMagicBits << 23 is 0
}

// counters += m * 2^n with n relative to the lowest position, m < 2^32
VS_DEVICE void limbs_add(int64_t* c, uint32_t m, int32_t n) {
  c[2] += ptx::shifted(m, n);
  c[1] += ptx::shifted(m, n - 32);
  c[0] += ptx::shifted(m, n - 64);
}

VS_DEVICE void limbs_add_tile(int64_t* c, int32_t J, float s, int32_t K) {
  const uint32_t b = bits(s);
  limbs_add(c, (b & 0x7fffffu) | 0x800000u, static_cast<int32_t>(b >> 23) + (K - 150 - kScale - 32 * (J - 2)));
}

VS_DEVICE void limbs_add_entropy(int64_t* u, int32_t J, float s, float d, int32_t K) {
  const EntropyValue value = entropy_value(K, s, d);
  const int32_t n = value.e + K - kScale - 32 * (J - 2);
  const uint32_t low = static_cast<uint32_t>(value.m), high = static_cast<uint32_t>(value.m >> 32);
  const int64_t sign = value.negative ? -1 : 1;
  u[2] += sign * static_cast<int64_t>(ptx::shifted(low, n) | ptx::shifted(high, n + 32));
  u[1] += sign * static_cast<int64_t>(ptx::shifted(low, n - 32) | ptx::shifted(high, n));
  u[0] += sign * static_cast<int64_t>(ptx::shifted(low, n - 64) | ptx::shifted(high, n - 32));
}

VS_DEVICE float tile_max(const float (&y)[kTile]) {
  float m[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) m[i] = ptx::max_nan(ptx::max_nan(y[i], y[i + 4]), ptx::max_nan(y[i + 8], y[i + 12]));
  return ptx::max_nan(ptx::max_nan(m[0], m[1]), ptx::max_nan(m[2], m[3]));
}

// A tile's value, s * 2^(K - kScale), and with the entropy (K s + d) * 2^(K - kScale).
template <bool kEntropy>
struct TileSum {
  float s;
};
template <>
struct TileSum<true> {
  float s, d;
  int32_t K;
};

// Two terms, and d times each of them. Their chains run in step: ptxas, which sees registers run short, would take one
// after the other, and moves nothing across the fence. All columns at once would be in the tensor cores' way.
VS_DEVICE void two_terms(const float* y, const Scale& s, float minus_k, float* e, float* w) {
  float v[2], t[2], f[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    v[j] = fmaxf(y[j], s.low);
    t[j] = fma(v[j], kLog2e, s.magic);
    f[j] = fma(v[j], kLog2e, add(s.magic, -t[j]));
  }
  ptx::schedule_fence();
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    e[j] = from_bits(bits(exp_poly(f[j])) + (bits(t[j]) << 23));
    w[j] = mul(e[j], fma(v[j], kLog2e, minus_k));
  }
}

// The tree is contract.h's tree16, four columns at a time.
template <bool kEntropy>
VS_DEVICE TileSum<kEntropy> tile_sum(const float (&y)[kTile], const Scale& scale) {
  const float minus_k = static_cast<float>(-scale.K);
  float e4[4], w4[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float e[4], w[4];
    if constexpr (kEntropy) {
      two_terms(y + 4 * i, scale, minus_k, e, w);
      two_terms(y + 4 * i + 2, scale, minus_k, e + 2, w + 2);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) e[j] = scaled_term(fmaxf(y[4 * i + j], scale.low), scale);
    }
    e4[i] = add(add(e[0], e[1]), add(e[2], e[3]));
    if constexpr (kEntropy) w4[i] = add(add(w[0], w[1]), add(w[2], w[3]));
  }
  TileSum<kEntropy> sum;
  sum.s = add(add(e4[0], e4[1]), add(e4[2], e4[3]));
  if constexpr (kEntropy) {
    sum.d = add(add(w4[0], w4[1]), add(w4[2], w4[3]));
    sum.K = scale.K;
  }
  return sum;
}

// The largest of a lane's columns in the first `tiles` tiles.
template <int kTiles>
VS_DEVICE float lane_max(const float (&y)[kTiles][kTile], int32_t tiles) {
  float m = tile_max(y[0]);
#pragma unroll
  for (int a = 1; a < kTiles; ++a)
    if (a < tiles) m = ptx::max_nan(m, tile_max(y[a]));
  return m;
}

VS_DEVICE float quad_max(float m) {
  m = ptx::max_nan(m, __shfl_xor_sync(~0u, m, 1));
  return ptx::max_nan(m, __shfl_xor_sync(~0u, m, 2));
}

// Nothing is read earlier than here: registers are scarce.
template <class Add>
VS_DEVICE void counters_update(int64_t* counters, int32_t rise, const Add& add_to) {
  asm volatile("" ::: "memory");
  int64_t c[kLimbs];
#pragma unroll
  for (int i = 0; i < kLimbs; ++i) c[i] = counters[32 * i];
  counters_raise(c, rise);
  add_to(c);
#pragma unroll
  for (int i = 0; i < kLimbs; ++i) counters[32 * i] = c[i];
}

// Adds kTiles tiles of 16 columns to a lane's counters of a row whose maximum rises from `before` to y_max. The
// counters are read last: registers are scarce. Before the first finite logit they are zero, so that it does not matter
// by how much they rise. y: clamp_finite where y_max < kNearLimitFrom. From `tiles` on there are none.
template <bool kEntropy, int kTiles>
VS_DEVICE void lane_add(int64_t* counters, float before, float y_max, const float (&y)[kTiles][kTile], int32_t tiles) {
  const Scale running = make_scale(y_max);
  const int32_t K_before = make_scale(before).K, J = limb_top(running.K), J_u = limb_top_entropy(running.K);
  int32_t rise = J - limb_top(K_before), rise_u = J_u - limb_top_entropy(K_before);
  if constexpr (kEntropy) {  // tile by tile, each with its own K
#pragma unroll
    for (int a = 0; a < kTiles; ++a) {
      if (a >= tiles) break;
      const TileSum<true> sum = tile_sum<true>(y[a], make_scale(tile_max(y[a])));
      counters_update(counters, rise, [&](int64_t* c) { limbs_add_tile(c, J, sum.s, sum.K); });
      counters_update(counters + 32 * kLimbs, rise_u,
                      [&](int64_t* u) { limbs_add_entropy(u, J_u, sum.s, sum.d, sum.K); });
      rise = rise_u = 0;
    }
  } else {
    TileSum<false> sums[kTiles];
#pragma unroll
    for (int a = 0; a < kTiles; ++a)
      if (a < tiles) sums[a] = tile_sum<false>(y[a], running);
    counters_update(counters, rise, [&](int64_t* c) {
#pragma unroll
      for (int a = 0; a < kTiles; ++a)
        if (a < tiles) limbs_add_tile(c, J, sums[a].s, running.K);
    });
  }
}

// The four lanes' counters of a row together: integers, of the same positions.
template <bool kEntropy>
VS_DEVICE Partial quad_partial(const int64_t* counters, float y_max) {
  Partial p = {y_max, quiet_nan(), {0, 0, 0}, {0, 0, 0}};
#pragma unroll
  for (int i = 0; i < kLaneWords<kEntropy>; ++i) {
    int64_t x = counters[32 * i];
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 2);
    (i < kLimbs ? p.c[i % kLimbs] : p.u[i % kLimbs]) = x;
  }
  return p;
}

}  // namespace vocabshard::sm90
