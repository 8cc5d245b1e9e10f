// What one thread knows of a row: it takes whole tiles of 16 columns and keeps the exact sum in three doubles.
//
// Terms are p * 2^(k - R) with R = 32 J - kOffset instead of a K of each tile. That changes no kept bit: a tree of fp32
// additions is the same at every scale as long as nothing overflows and every term within kSpan of the maximum is
// normal, and with kOffset = 94 the largest term has an exponent of at most 121 (16 of them stay below 2^126) and a
// term at k_max - 196 one of at least -106. So R moves only when J does, and a tile costs no maximum of its own.
#pragma once

#include <cstdint>

#include "contract.h"

namespace vocabshard::logits {

#define VS_DEVICE __device__ __forceinline__

#ifndef VOCABSHARD_EXP_DEGREE
#define VOCABSHARD_EXP_DEGREE 6
#endif

constexpr int kOffset = 94;
constexpr int32_t kEmptyJ = kEmptyK >> 5;
constexpr int kLowest = -112;     // exponent to which small logits are raised: below what is kept, still normal
constexpr int kUnclamped = -120;  // down to here a logit needs no raising
// Doubles in which one unit in the last place is a counter's unit: 2^(kOffset - 32 i), i = 0, 1, 2.
constexpr float kLn2f = 0.6931471805599453f;  // for limits only
constexpr double kCounter0 = 0x1.8p+146, kCounter1 = 0x1.8p+114, kCounter2 = 0x1.8p+82;
static_assert(kOffset == 94, "the counters' magic numbers are written for it");

// ---- elements ----

struct BF16 {
  static constexpr int kBytes = 2;
  static constexpr uint32_t kTablePatterns = 0x4280;  // below 64
  // volatile here and below: kept before the load that overwrites the words, in one place
  VS_DEVICE static float low(uint32_t w) {
    float x;
    asm volatile("shl.b32 %0, %1, 16;" : "=f"(x) : "r"(w));
    return x;
  }
  VS_DEVICE static float high(uint32_t w) {
    float x;
    asm volatile("and.b32 %0, %1, 0xffff0000;" : "=f"(x) : "r"(w));
    return x;
  }
  VS_DEVICE static uint32_t max2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  // A value's bits, rounded towards zero or away from it.
  VS_DEVICE static uint32_t toward_zero(float x) { return bits(x) >> 16; }
  VS_DEVICE static constexpr uint32_t largest() { return 0x7f7fu; }
  VS_DEVICE static float value(uint32_t b) { return from_bits(b << 16); }
  static constexpr uint32_t kNegInf2 = 0xff80ff80u;
};

struct F16 {
  static constexpr int kBytes = 2;
  VS_DEVICE static float value(uint32_t b) {
    float x;
    asm volatile("{\n.reg .b16 h;\ncvt.u16.u32 h, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(x) : "r"(b));
    return x;
  }
  VS_DEVICE static float low(uint32_t w) { return value(w & 0xffffu); }
  VS_DEVICE static float high(uint32_t w) { return value(w >> 16); }
  VS_DEVICE static uint32_t max2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  VS_DEVICE static uint32_t toward_zero(float x) {
    uint32_t r;
    asm("{\n.reg .b16 h;\ncvt.rz.f16.f32 h, %1;\ncvt.u32.u16 %0, h;\n}" : "=r"(r) : "f"(x));
    return r;
  }
  VS_DEVICE static constexpr uint32_t largest() { return 0x7bffu; }
  static constexpr uint32_t kNegInf2 = 0xfc00fc00u;
};

struct F32 {
  static constexpr int kBytes = 4;
  static constexpr uint32_t kNegInf2 = kNegInfBits;
};

template <typename T>
constexpr int kWords = kTile * T::kBytes / 4;  // words of a tile

VS_DEVICE float max_nan_f32(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

template <typename T, int kCount = kTile>
VS_DEVICE void unpack(const uint32_t (&w)[kWords<T>], float (&y)[kTile]) {
#pragma unroll
  for (int i = 0; i < kCount * T::kBytes / 4; ++i) {
    if constexpr (T::kBytes == 4) {
      y[i] = from_bits(w[i]);
    } else {
      y[2 * i] = T::low(w[i]);
      y[2 * i + 1] = T::high(w[i]);
    }
  }
}

// Where the table holds the last kLookups elements' exponentials: base + 4 * pattern, by one dot product each.
template <typename T, int kLookups>
VS_DEVICE void table_places(const uint32_t (&w)[kWords<T>], uint32_t base, uint32_t (&place)[kTile]) {
#pragma unroll
  for (int i = kTile - kLookups; i < kTile; i += 2) {
    asm volatile("dp2a.lo.u32.u32 %0, %1, 0x0004, %2;" : "=r"(place[i]) : "r"(w[i / 2]), "r"(base));
    asm volatile("dp2a.lo.u32.u32 %0, %1, 0x0400, %2;" : "=r"(place[i + 1]) : "r"(w[i / 2]), "r"(base));
  }
}

// ---- exponential ----

template <int kDegree>
VS_DEVICE float exp_poly_of(float f) {
  if constexpr (kDegree == kExpDegree) return exp_poly(f);
  float p = fma(kExp5, f, kExp4);  // a degree that is measured, never shipped
  p = fma(p, f, kExp3);
  p = fma(p, f, kExp2);
  p = fma(p, f, kExp1);
  return fma(p, f, 1.0f);
}

// p * 2^(k - R), magic = kMagic - R.
VS_DEVICE float scaled_exp(float y, float magic) {
  const float t = fma(y, kLog2e, magic);
  const float f = fma(y, kLog2e, add(magic, -t));  // magic - t = -k exactly
  return from_bits(bits(exp_poly_of<VOCABSHARD_EXP_DEGREE>(f)) + (bits(t) << 23));
}

// ---- exact counters in doubles ----

// Cuts x >= 0 at multiples of the three units, from the top; what is below the last is dropped.
VS_DEVICE void split(double x, double (&piece)[kLimbs]) {
  piece[0] = __dadd_rz(kCounter0, x) - kCounter0;
  x = add(x, -piece[0]);
  piece[1] = __dadd_rz(kCounter1, x) - kCounter1;
  x = add(x, -piece[1]);
  piece[2] = __dadd_rz(kCounter2, x) - kCounter2;
}

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
    double piece[kLimbs];
    split(fabs(x), piece);
#pragma unroll
    for (int i = 0; i < kLimbs; ++i) a[i] = add(a[i], x < 0.0 ? -piece[i] : piece[i]);
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

VS_DEVICE double pow2(int32_t n) { return from_bits(static_cast<uint64_t>(1023 + n) << 52); }

// ---- the exponential of a 16-bit logit by table ----
//
// e^y = p * 2^k of every bit pattern up to kTableLimit in size, addressed by the pattern itself: positive numbers from
// 0 on, negative ones from 0x8000 on. The same bits as the polynomial's for a third of the instructions, but a random
// bank: a tile takes some of its exponentials this way and the others by the polynomial, so that neither pipe is full.

constexpr float kTableLimit = 64.0f;

template <typename T>
struct Table {
  static constexpr uint32_t kPatterns = T::kTablePatterns;
  static constexpr uint32_t kBytes = 4 * (0x8000 + kPatterns);

  VS_DEVICE static float entry(uint32_t pattern, float scale) {
    const Exp e = exp_split(mul(T::value(pattern), scale));
    return scale_pow2(e.p, e.k);
  }

  // By all threads of the block. Entries whose y is out of the limit are never read.
  VS_DEVICE static void fill(float* table, float scale) {
    for (uint32_t i = 4 * threadIdx.x; i < 2 * kPatterns; i += 4 * blockDim.x) {
      const uint32_t first = i < kPatterns ? i : 0x8000 + i - kPatterns;
      float4 v = {1.0f, 1.0f, 1.0f, 1.0f};
      if (fabsf(mul(T::value(first + 3), scale)) > 0x1p-26f)
        v = {entry(first, scale), entry(first + 1, scale), entry(first + 2, scale), entry(first + 3, scale)};
      *reinterpret_cast<float4*>(table + first) = v;
    }
  }
};

// ---- a thread's share of a row ----

// kLookups: exponentials of a tile that come from the table, the last ones.
template <typename T, bool kEntropy, int kLookups = 0>
struct Share {
  static_assert(kLookups == 0 || kLookups == 4 || kLookups == 8 || kLookups == 12, "the table serves whole quads");
  static constexpr int kComputed = kTile - kLookups;
  uint32_t maximum;  // of the raw logits, packed as they are
  uint32_t high;     // fast as long as maximum <= high
  uint32_t low;      // and no bit pattern is above low (a negative number)
  float magic;       // kMagic - R
  float factor;      // 2^-R, where the table serves
  int32_t J;
  Counters c;
  Counters u;
  int32_t J_u;

  VS_DEVICE void clear() {
    maximum = T::kNegInf2;
    slow();
    magic = kMagic;
    J = J_u = kEmptyJ;
    c.clear();
    if constexpr (kEntropy) u.clear();
  }

  VS_DEVICE void slow() {  // no tile passes the test for the fast way
    high = T::kNegInf2;
    low = 0;
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

  // Every logit of the tile, and the maximum so far, lie where neither clamp nor a new J is needed. The bits of
  // negative numbers grow with their size as unsigned integers, above those of all positive ones.
  // Zero if so.
  VS_DEVICE uint32_t special(const uint32_t (&w)[kWords<T>]) const {
    uint32_t most = low;
#pragma unroll
    for (int i = 0; i < kWords<T>; i += 2)
      most = T::kBytes == 4 ? __vimax3_u32(w[i], w[i + 1], most) : __vimax3_u16x2(w[i], w[i + 1], most);
    uint32_t above;  // a NaN is not high
    if constexpr (T::kBytes == 4)
      above = bits(max_nan_f32(from_bits(maximum), from_bits(high)));
    else
      above = T::max2(maximum, high);
    return (most ^ low) | (above ^ high);
  }

  // Makes any tile fit for add(): raises J, clamps y. False: there is nothing to add.
  VS_DEVICE bool prepare(float (&y)[kTile], float scale);

  VS_DEVICE void add(const float (&y)[kTile]) {
    float e[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) e[i] = scaled_exp(y[i], magic);
    c.add_positive(static_cast<double>(tree16(e)));
  }

  // The same bits as add(), for a tile that is not special. place: of the last kLookups logits.
  VS_DEVICE void add_looked_up(const float (&y)[kTile], const uint32_t (&place)[kTile]) {
    float e[kTile], q[4];
#pragma unroll
    for (int i = kComputed; i < kTile; ++i) asm("ld.shared.f32 %0, [%1];" : "=f"(e[i]) : "r"(place[i]));
#pragma unroll
    for (int i = 0; i < kComputed; ++i) e[i] = scaled_exp(y[i], magic);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      q[i] = vocabshard::add(vocabshard::add(e[4 * i], e[4 * i + 1]), vocabshard::add(e[4 * i + 2], e[4 * i + 3]));
    // the table has R = 0; moving to R is exact
    float first, second;
    if constexpr (kLookups == 12) q[1] = mul(q[1], factor);
    if constexpr (kLookups == 4) q[3] = mul(q[3], factor);
    first = vocabshard::add(q[0], q[1]);
    second = vocabshard::add(q[2], q[3]);
    if constexpr (kLookups >= 8) second = mul(second, factor);
    c.add_positive(static_cast<double>(vocabshard::add(first, second)));
  }

  // With entropy every tile has its own K. Clamps by itself.
  VS_DEVICE void add_with_entropy(const float (&y)[kTile]);

  VS_DEVICE void rise_to(int32_t k_max, float scale);

  // y_max of this share; scale: what y has been multiplied by.
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
};

// Moves J, R and the limits of the fast way. scale > 0 is what logits are multiplied by.
template <typename T, bool kEntropy, int kLookups>
VS_DEVICE void Share<T, kEntropy, kLookups>::rise_to(int32_t k_max, float scale) {
  const int32_t top = limb_top(k_max);
  if (top != J) {
    c.raise(top - J);
    J = top;
    const int32_t R = 32 * J - kOffset;
    magic = static_cast<float>(12582912 - R);
    slow();
    if (!kEntropy && J <= 6 && (kLookups == 0 || (J >= -1 && J <= 3))) {  // there low is negative
      float high_y = mul(static_cast<float>(32 * J + 27), kLn2f),
            low_y = mul(static_cast<float>(R + kUnclamped), kLn2f);
      if constexpr (kLookups > 0) {
        high_y = fminf(high_y, kTableLimit);
        low_y = fmaxf(low_y, -kTableLimit);
        factor = from_bits(static_cast<uint32_t>(127 - R) << 23);
      }
      float high_x = div(high_y, scale), low_x = div(low_y, scale);
      if constexpr (kLookups > 0) {
        high_x = fminf(high_x, 0.99f * kTableLimit);
        low_x = fmaxf(low_x, -0.99f * kTableLimit);
      }
      uint32_t h, l;
      float hv, lv;
      if constexpr (T::kBytes == 4) {
        h = bits(high_x) + (high_x < 0.0f ? 8u : static_cast<uint32_t>(-8));
        l = bits(low_x) - 8u;
        hv = from_bits(h);
        lv = from_bits(l);
      } else {
        // high down: for a negative number that is one step further from zero
        h = high_x < 0.0f ? T::toward_zero(high_x) + 1 : min(T::toward_zero(high_x), T::largest());
        l = min(T::toward_zero(low_x), T::largest() | 0x8000u);
        hv = T::value(h);
        lv = T::value(l);
        h |= h << 16;
        l |= l << 16;
      }
      // trusted only where they are seen to hold
      const float top_y = mul(hv, scale), bottom_y = mul(lv, scale);
      const bool good = (bits(hv) & 0x7fffffffu) < 0x7f800000u && (bits(lv) & 0x7fffffffu) < 0x7f800000u && lv < 0.0f &&
                        top_y <= kLogitLimit && bottom_y >= -kLogitLimit;
      if (good && exp_k(top_y) <= 32 * J + 27 && exp_k(bottom_y) - R >= kUnclamped - 4) {
        high = h;
        low = l;
      }
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

template <typename T, bool kEntropy, int kLookups>
VS_DEVICE bool Share<T, kEntropy, kLookups>::prepare(float (&y)[kTile], float scale) {
  const float all = y_max(scale);  // of every tile so far
  if (is_neg_inf(all) || poisons(all)) return false;
  rise_to(exp_k(clamp_logit(all)), scale);
  if constexpr (!kEntropy) {
    const float lowest = mul(static_cast<float>(32 * J - kOffset + kLowest), kLn2f);
    if (lowest < -kLogitLimit) {  // the maximum itself is about -2^20: finite logits below that count as -2^20
#pragma unroll
      for (int i = 0; i < kTile; ++i) y[i] = is_neg_inf(y[i]) ? y[i] : clamp_logit(y[i]);
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) y[i] = fmaxf(y[i], lowest);
  }
  return true;
}

template <typename T, bool kEntropy, int kLookups>
VS_DEVICE void Share<T, kEntropy, kLookups>::add_with_entropy(const float (&y)[kTile]) {
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
    const float f = fma(v, kLog2e, vocabshard::add(magic_K, -t));
    const float term = from_bits(bits(exp_poly_of<VOCABSHARD_EXP_DEGREE>(f)) + (bits(t) << 23));
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

}  // namespace vocabshard::logits
