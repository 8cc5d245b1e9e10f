// What one thread knows of a row: it takes whole tiles of 16 columns and keeps the exact sum in three doubles.
//
// Terms are p * 2^(k - R) with R = 32 J - kOffset instead of a K of each tile. That changes no kept bit: a tree of fp32
// additions is the same at every scale as long as nothing overflows and every term within kSpan of the maximum is
// normal, and with kOffset = 94 the largest term has an exponent of at most 121 (16 of them stay below 2^126) and a
// term at k_max - 196 one of at least -106. So R moves only when J does, and a tile costs no maximum of its own.
#pragma once

#include "sm90/logits_element.cuh"

namespace vocabshard::sm90::logits {

constexpr int kOffset = 94;
constexpr int32_t kEmptyJ = kEmptyK >> 5;
constexpr int kLowest = -112;                 // exponent to which small terms are raised: not kept, still normal
constexpr int kUnclamped = -120;              // down to here a term needs no raising
constexpr float kLn2f = 0.6931471805599453f;  // for limits only

// Doubles in which one unit in the last place is a counter's unit: 2^(kOffset - 32 i), i = 0, 1, 2.
constexpr double kCounter0 = 0x1.8p+146, kCounter1 = 0x1.8p+114, kCounter2 = 0x1.8p+82;
static_assert(kOffset == 94, "the counters' magic numbers are written for it");

// p * 2^(k - R), magic = kMagic - R.
VS_DEVICE float scaled_exp(float y, float magic) {
  const float t = fma(y, kLog2e, magic);
  const float f = fma(y, kLog2e, add(magic, -t));  // magic - t = -k exactly
  return from_bits(bits(exp_poly(f)) + (bits(t) << 23));
}

VS_DEVICE double pow2(int32_t n) { return from_bits(static_cast<uint64_t>(1023 + n) << 52); }

struct Counters {
  double a[kLimbs];

  VS_DEVICE void clear() {
    a[0] = kCounter0;
    a[1] = kCounter1;
    a[2] = kCounter2;
  }

  // x >= 0: rounding towards zero adds the whole units of x; the rest goes on to the next.
  VS_DEVICE void add_positive(double x) {
    double next = __dadd_rz(a[0], x);
    x = add(x, -add(next, -a[0]));
    a[0] = next;
    next = __dadd_rz(a[1], x);
    x = add(x, -add(next, -a[1]));
    a[1] = next;
    a[2] = __dadd_rz(a[2], x);
  }

  // Cut by magnitude, the sign following.
  VS_DEVICE void add_signed(double x) {
    const double zero[kLimbs] = {kCounter0, kCounter1, kCounter2};
    double rest = fabs(x);
#pragma unroll
    for (int i = 0; i < kLimbs; ++i) {
      const double piece = add(__dadd_rz(zero[i], rest), -zero[i]);
      rest = add(rest, -piece);
      a[i] = add(a[i], x < 0.0 ? -piece : piece);
    }
  }

  VS_DEVICE void get(int64_t* c) const {
    c[0] = static_cast<int64_t>(bits(a[0]) - bits(kCounter0));
    c[1] = static_cast<int64_t>(bits(a[1]) - bits(kCounter1));
    c[2] = static_cast<int64_t>(bits(a[2]) - bits(kCounter2));
  }

  VS_DEVICE void raise(int32_t rise) {
    int64_t c[kLimbs];
    get(c);
    counters_raise(c, rise);
    a[0] = from_bits(static_cast<uint64_t>(c[0]) + bits(kCounter0));
    a[1] = from_bits(static_cast<uint64_t>(c[1]) + bits(kCounter1));
    a[2] = from_bits(static_cast<uint64_t>(c[2]) + bits(kCounter2));
  }
};

// The largest and the lowest logit that need no care while the top position is J, as bit patterns (twice in a word for
// 16-bit types); without any, patterns that no tile passes. `scale` is what logits are multiplied by, `limit` bounds
// their size, before and after that.
template <typename T>
struct Limits {
  uint32_t high = T::kNegInf2, low = 0;

  VS_DEVICE void set(int32_t J, float scale, float limit) {
    *this = Limits();
    if (J > 6) return;  // low has to be negative
    const int32_t R = 32 * J - kOffset;
    const float rest = __frcp_rn(scale), most = fminf(limit, mul(limit, rest));
    const float high_x = fminf(most, mul(mul(static_cast<float>(32 * J + 27), kLn2f), rest));
    const float low_x = fmaxf(-most, mul(mul(static_cast<float>(R + kUnclamped), kLn2f), rest));
    uint32_t h, l;
    float hv, lv;
    if constexpr (T::kBytes == 4) {
      h = bits(high_x) + (high_x < 0.0f ? 64u : static_cast<uint32_t>(-64));
      l = bits(low_x) - 64u;
      hv = from_bits(h);
      lv = from_bits(l);
    } else {
      // high down: for a negative number that is one step further from zero
      h = high_x < 0.0f ? T::toward_zero(high_x) + 1 : min(T::toward_zero(high_x), T::kLargest);
      l = min(T::toward_zero(low_x), T::kLargest | 0x8000u);
      hv = T::value(h);
      lv = T::value(l);
      h |= h << 16;
      l |= l << 16;
    }
    // trusted only where they are seen to hold
    const float top = mul(hv, scale), bottom = mul(lv, scale);
    const bool finite = (bits(hv) & 0x7fffffffu) < 0x7f800000u && (bits(lv) & 0x7fffffffu) < 0x7f800000u;
    if (finite && lv < 0.0f && top <= kLogitLimit && bottom >= -kLogitLimit && exp_k(top) <= 32 * J + 27 &&
        exp_k(bottom) - R >= kUnclamped - 4) {
      high = h;
      low = l;
    }
  }
};

template <typename T, bool kEntropy, bool kTable>
struct Share {
  uint32_t maximum;  // of the raw logits, packed as they are
  Limits<T> limits;
  float magic;  // kMagic - R
  int32_t J, J_u;
  Counters c, u;

  VS_DEVICE void clear() {
    maximum = T::kNegInf2;
    limits = Limits<T>();
    magic = kMagic;
    J = J_u = kEmptyJ;
    c.clear();
    u.clear();
  }

  VS_DEVICE void see(const uint32_t (&w)[kWords<T>]) {
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) {
      if constexpr (T::kBytes == 4)
        maximum = bits(max_nan_f32(from_bits(maximum), from_bits(w[i])));
      else
        maximum = T::max2(maximum, w[i]);
    }
  }

  // The tile, now `see`n, if every logit of it and the maximum so far lie where neither a clamp nor a new J is needed.
  // The bits of negative numbers grow with their size as unsigned integers, above those of all positive ones.
  VS_DEVICE bool plain(const uint32_t (&w)[kWords<T>]) {
    see(w);
    uint32_t most = limits.low;
#pragma unroll
    for (int i = 0; i < kWords<T>; i += 2)
      most = T::kBytes == 4 ? __vimax3_u32(w[i], w[i + 1], most) : __vimax3_u16x2(w[i], w[i + 1], most);
    uint32_t above;  // a NaN is not high
    if constexpr (T::kBytes == 4)
      above = bits(max_nan_f32(from_bits(maximum), from_bits(limits.high)));
    else
      above = T::max2(maximum, limits.high);
    return ((most ^ limits.low) | (above ^ limits.high)) == 0;
  }

  // The same for two tiles.
  VS_DEVICE bool plain2(const uint32_t (&a)[kWords<T>], const uint32_t (&b)[kWords<T>]) {
    see(a);
    see(b);
    return inside(a, b);
  }

  VS_DEVICE bool inside(const uint32_t (&a)[kWords<T>], const uint32_t (&b)[kWords<T>]) const {
    static_assert(T::kBytes == 2, "");
    uint32_t most = limits.low;
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) most = __vimax3_u16x2(a[i], b[i], most);
    const uint32_t above = T::max2(maximum, limits.high);
    return ((most ^ limits.low) | (above ^ limits.high)) == 0;
  }

  // To the position of what has been seen.
  VS_DEVICE void rise(float scale, float limit) {
    const float all = y_max(scale);
    if (!is_neg_inf(all) && !poisons(all)) rise_to(exp_k(clamp_logit(all)), scale, limit);
  }

  VS_DEVICE void add_tile(const float (&y)[kTile]) {
    float e[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) e[i] = scaled_exp(y[i], magic);
    c.add_positive(static_cast<double>(tree16(e)));
  }

  // The same for a plain tile whose second half is looked up: the sum of its exponentials comes with R = 0.
  VS_DEVICE void add_halves(const float (&y)[kTile / 2], float second) {
    const float factor = from_bits((bits(magic) << 23) + 0x3f800000u);  // 2^-R, and exact
    float e[kTile / 2];
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) e[i] = scaled_exp(y[i], magic);
    c.add_positive(static_cast<double>(add(tree8(e), mul(second, factor))));
  }

  // Any tile, `see`n before. scale: what y has been multiplied by; limit: what a table's limits are.
  VS_DEVICE void add_any(float (&y)[kTile], float scale, float limit) {
    const float all = y_max(scale);  // of every tile so far
    if (is_neg_inf(all) || poisons(all)) return;
    rise_to(exp_k(clamp_logit(all)), scale, limit);
    if constexpr (kEntropy) {
      add_with_entropy(y);
      return;
    }
    const float lowest = mul(static_cast<float>(32 * J - kOffset + kLowest), kLn2f);
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      // where the maximum itself is about -2^20, finite logits below that count as -2^20
      if (lowest < -kLogitLimit) y[i] = is_neg_inf(y[i]) ? y[i] : clamp_logit(y[i]);
      y[i] = fmaxf(y[i], lowest);
    }
    add_tile(y);
  }

  // y_max of this share.
  VS_DEVICE float y_max(float scale) const {
    float x;
    if constexpr (T::kBytes == 4)
      x = from_bits(maximum);
    else
      x = max_nan_f32(T::low(maximum), T::high(maximum));
    return is_neg_inf(x) ? x : mul(x, scale);
  }

  VS_DEVICE Partial partial(float scale) const {
    Partial p = partial_identity();
    p.y_max = y_max(scale);
    if (poisons(p.y_max) || is_neg_inf(p.y_max)) return p;
    c.get(p.c);
    if constexpr (kEntropy) u.get(p.u);
    return p;
  }

 private:
  VS_DEVICE static float add(float a, float b) { return vocabshard::add(a, b); }

  VS_DEVICE static float tree8(const float* e) {
    return add(add(add(e[0], e[1]), add(e[2], e[3])), add(add(e[4], e[5]), add(e[6], e[7])));
  }

  VS_DEVICE void rise_to(int32_t k_max, float scale, float limit) {
    const int32_t top = limb_top(k_max);
    if (top != J) {
      c.raise(top - J);
      J = top;
      const int32_t R = 32 * J - kOffset;
      magic = static_cast<float>(12582912 - R);
      if constexpr (!kEntropy) {
        limits = Limits<T>();
        if (!kTable || (J >= -1 && J <= 3)) limits.set(J, scale, limit);  // there 2^-R and what it scales are normal
      }
    }
    if constexpr (kEntropy) {
      const int32_t top_u = limb_top_entropy(k_max);
      if (top_u != J_u) {
        u.raise(top_u - J_u);
        J_u = top_u;
      }
    }
  }

  // Every tile has a K of its own here.
  VS_DEVICE void add_with_entropy(const float (&y)[kTile]) {
    float top = y[0];
#pragma unroll
    for (int i = 1; i < kTile; ++i) top = fmaxf(top, y[i]);
    const int32_t K = exp_k(clamp_logit(top));
    const float magic_K = static_cast<float>(12582912 + kScale - K), minus_K = static_cast<float>(-K);
    float e[kTile], w[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      const float v = clamp_logit(y[i]);
      const float t = fma(v, kLog2e, magic_K);
      const float f = fma(v, kLog2e, add(magic_K, -t));
      const float term = from_bits(bits(exp_poly(f)) + (bits(t) << 23));
      e[i] = t < 12582912.0f + kScale - kSpan || is_neg_inf(y[i]) ? 0.0f : term;
      w[i] = mul(e[i], fma(v, kLog2e, minus_K));  // 0 * d is a zero of either sign: the same sums
    }
    const float s = tree16(e);
    const double mean =
        vocabshard::add(mul(static_cast<double>(K), static_cast<double>(s)), static_cast<double>(tree16(w)));
    // from units of 2^(K - kScale) to units of 2^R; what is far below the last counter adds nothing
    const int32_t n = max(K - kScale - (32 * J - kOffset), -300), n_u = max(K - kScale - (32 * J_u - kOffset), -300);
    c.add_positive(mul(static_cast<double>(s), pow2(n)));
    u.add_signed(mul(mean, pow2(n_u)));
  }
};

}  // namespace vocabshard::sm90::logits
