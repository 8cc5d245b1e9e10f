// One lane's partial of one row, in registers: contract.h's partial_add_tile for the columns a lane owns, with its
// bytes but fewer instructions. All columns of a tile share one K (the lane's maximum so far) and one magic constant;
// what contract.h drops by selection is clamped to a term that lies below every counter.
#pragma once

#include "contract.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

// In memory: 16 bytes a lane at a time, 32 lanes side by side, so that a warp's access is one run.
// Parts 0 and 1: {y_max, J}, c[0], c[1], c[2]; with the entropy, 2 and 3: u[0], u[1], u[2], -.
// J is limb_top of y_max; anything for a poisoned row.
template <bool kEntropy>
constexpr int kLaneParts = kEntropy ? 4 : 2;
constexpr int kLanePartBytes = 32 * 16;

VS_DEVICE longlong2& lane_part(char* at, int part) { return *reinterpret_cast<longlong2*>(at + part * kLanePartBytes); }
VS_DEVICE const longlong2& lane_part(const char* at, int part) {
  return *reinterpret_cast<const longlong2*>(at + part * kLanePartBytes);
}
VS_DEVICE int64_t lane_head(float y_max, int32_t J) {
  return static_cast<int64_t>((static_cast<uint64_t>(static_cast<uint32_t>(J)) << 32) | bits(y_max));
}

template <bool kEntropy>
VS_DEVICE void lane_clear(char* at) {
  lane_part(at, 0) = make_longlong2(lane_head(neg_inf(), limb_top(kEmptyK)), 0);
#pragma unroll
  for (int i = 1; i < kLaneParts<kEntropy>; ++i) lane_part(at, i) = make_longlong2(0, 0);
}

template <bool kEntropy>
VS_DEVICE Partial lane_partial(const char* at) {
  const longlong2 a = lane_part(at, 0), b = lane_part(at, 1);
  Partial p = {from_bits(static_cast<uint32_t>(a.x)), quiet_nan(), {a.y, b.x, b.y}, {0, 0, 0}};
  if constexpr (kEntropy) {
    const longlong2 d = lane_part(at, 2), e = lane_part(at, 3);
    p.u[0] = d.x;
    p.u[1] = d.y;
    p.u[2] = e.x;
  }
  return p;
}

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

// Near -2^20 the clamp of contract.h (finite logits count as -2^20) differs from `low`: rare, and done beforehand.
constexpr float kNearLimitFrom = -kLogitLimit + 256.0f;
VS_DEVICE float clamp_finite(float y) { return is_neg_inf(y) ? y : fmaxf(y, -kLogitLimit); }

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

VS_DEVICE void limbs_add_entropy(int64_t* u, int32_t J, double value, int32_t K) {
  const uint64_t b = bits(value);
  const int32_t e = static_cast<int32_t>((b >> 52) & 0x7ff), n = e - 1075 + K - kScale - 32 * (J - 2);
  const uint32_t low = e == 0 ? 0u : static_cast<uint32_t>(b);
  const uint32_t high = e == 0 ? 0u : (static_cast<uint32_t>(b >> 32) & 0xfffffu) | 0x100000u;
  const int64_t sign = static_cast<int64_t>(b) < 0 ? -1 : 1;
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

// A tile's value, s * 2^(K - kScale), and with the entropy u * 2^(K - kScale).
template <bool kEntropy>
struct TileSum {
  float s;
};
template <>
struct TileSum<true> {
  float s;
  int32_t K;
  double u;
};

// kNearLimit: the maximum is close to -2^20. The tree is contract.h's tree16, four columns at a time.
template <bool kEntropy, bool kNearLimit>
VS_DEVICE TileSum<kEntropy> tile_sum(const float (&y)[kTile], const Scale& scale) {
  const float minus_k = static_cast<float>(-scale.K);
  float e4[4], w4[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float e[4], w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float v = fmaxf(kNearLimit ? clamp_finite(y[4 * i + j]) : y[4 * i + j], scale.low);
      e[j] = scaled_term(v, scale);
      if constexpr (kEntropy) w[j] = mul(e[j], fma(v, kLog2e, minus_k));
    }
    e4[i] = add(add(e[0], e[1]), add(e[2], e[3]));
    if constexpr (kEntropy) w4[i] = add(add(w[0], w[1]), add(w[2], w[3]));
  }
  TileSum<kEntropy> sum;
  sum.s = add(add(e4[0], e4[1]), add(e4[2], e4[3]));
  if constexpr (kEntropy) {
    const float d = add(add(w4[0], w4[1]), add(w4[2], w4[3]));
    sum.K = scale.K;
    sum.u = add(mul(static_cast<double>(scale.K), static_cast<double>(sum.s)), static_cast<double>(d));
  }
  return sum;
}

template <bool kEntropy, bool kNearLimit, int kTiles>
VS_DEVICE void tile_sums(TileSum<kEntropy> (&sums)[kTiles], const float (&y)[kTiles][kTile], const Scale& running) {
#pragma unroll
  for (int a = 0; a < kTiles; ++a)  // the entropy wants each tile's own K
    sums[a] = tile_sum<kEntropy, kNearLimit>(y[a], kEntropy ? make_scale(tile_max(y[a])) : running);
}

// Adds kTiles tiles of 16 columns to the partial in memory. The counters are read last: registers are scarce.
template <bool kEntropy, int kTiles>
VS_DEVICE void lane_add(char* at, const float (&y)[kTiles][kTile]) {
  const float y_max_before = *reinterpret_cast<const float*>(at);
  float y_max = tile_max(y[0]);
#pragma unroll
  for (int a = 1; a < kTiles; ++a) y_max = ptx::max_nan(y_max, tile_max(y[a]));
  y_max = ptx::max_nan(y_max_before, y_max);
  const Scale running = make_scale(y_max);
  TileSum<kEntropy> sums[kTiles];
  // a tile's own maximum can be near the limit only where the row's is, or where it comes to nothing
  if (y_max >= kNearLimitFrom)
    tile_sums<kEntropy, false>(sums, y, running);
  else
    tile_sums<kEntropy, true>(sums, y, running);

  const longlong2 first = lane_part(at, 0), second = lane_part(at, 1);
  const int32_t J = limb_top(running.K), J_before = static_cast<int32_t>(static_cast<uint64_t>(first.x) >> 32);
  int64_t c[kLimbs] = {first.y, second.x, second.y};
  if (J != J_before) counters_raise(c, J - J_before);
#pragma unroll
  for (int a = 0; a < kTiles; ++a) {
    if constexpr (kEntropy)
      limbs_add_tile(c, J, sums[a].s, sums[a].K);
    else
      limbs_add_tile(c, J, sums[a].s, running.K);
  }
  lane_part(at, 0) = make_longlong2(lane_head(y_max, J), c[0]);
  lane_part(at, 1) = make_longlong2(c[1], c[2]);
  if constexpr (kEntropy) {
    const longlong2 third = lane_part(at, 2), fourth = lane_part(at, 3);
    const int32_t J_u = limb_top_entropy(running.K);
    const int32_t rise = J_u - limb_top_entropy(is_neg_inf(y_max_before) ? kEmptyK : make_scale(y_max_before).K);
    int64_t u[kLimbs] = {third.x, third.y, fourth.x};
    if (rise != 0) counters_raise(u, rise);
#pragma unroll
    for (int a = 0; a < kTiles; ++a) limbs_add_entropy(u, J_u, sums[a].u, sums[a].K);
    lane_part(at, 2) = make_longlong2(u[0], u[1]);
    lane_part(at, 3) = make_longlong2(u[2], 0);
  }
}

}  // namespace vocabshard::sm90
