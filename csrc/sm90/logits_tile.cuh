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

constexpr int kOffset = 94;
constexpr int32_t kEmptyJ = kEmptyK >> 5;
// The exponent to which small logits and -inf are raised, relative to R, and the range that serves as well: below what
// is kept (-106), still normal.
constexpr int kLowest = -112, kLowestFrom = -124, kLowestTo = -107;
constexpr float kLn2f = 0.6931471805599453f;  // for limits only
// Doubles in which one unit in the last place is a counter's unit: 2^(kOffset - 32 i), i = 0, 1, 2.
constexpr double kCounter0 = 0x1.8p+146, kCounter1 = 0x1.8p+114, kCounter2 = 0x1.8p+82;
static_assert(kOffset == 94, "the counters' magic numbers are written for it");

// ---- elements ----

struct BF16 {
  static constexpr int kBytes = 2;
  static constexpr uint32_t kTablePatterns = 0x4384;  // up to 256
  static constexpr float kTableScale = 0.65f;         // temperatures above its inverse need more
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
  static constexpr uint32_t kTablePatterns = 0x5984;  // up to 176
  static constexpr float kTableScale = 0.85f;
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

// p * 2^(k - R), magic = kMagic - R.
VS_DEVICE float scaled_exp(float y, float magic) {
  const float t = fma(y, kLog2e, magic);
  const float f = fma(y, kLog2e, add(magic, -t));  // magic - t = -k exactly
  return from_bits(bits(exp_poly(f)) + (bits(t) << 23));
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
// Bits of p plus k in the exponent's place, wrapping: adding -R there gives the bits of p * 2^(k - R) for any R. It is
// addressed by the logit's own bits: positive numbers from 0 on, negative ones from 0x8000 on; between them lies a
// hole. The same bits as the polynomial's for a third of the instructions, but in a random bank: a tile takes some of
// its exponentials this way and the others by the polynomial, so that neither pipe is full.

template <typename T>
struct Table {
  static constexpr uint32_t kPatterns = T::kTablePatterns;
  static constexpr uint32_t kHole = 4 * kPatterns;  // bytes of it
  static constexpr uint32_t kHoleEnd = 4 * 0x8000;
  static constexpr uint32_t kBytes = kHoleEnd + 4 * kPatterns;

  VS_DEVICE static uint32_t entry(uint32_t pattern, float scale) {
    const Exp e = exp_split(mul(T::value(pattern), scale));
    return bits(e.p) + (static_cast<uint32_t>(e.k) << 23);
  }

  // By all threads of the block.
  VS_DEVICE static void fill(uint32_t* table, float scale) {
    for (uint32_t i = 4 * threadIdx.x; i < 2 * kPatterns; i += 4 * blockDim.x) {
      const uint32_t first = i < kPatterns ? i : 0x8000 + i - kPatterns;
      uint4 v = {bits(1.0f), bits(1.0f), bits(1.0f), bits(1.0f)};  // of the tiniest
      if (fabsf(mul(T::value(first + 3), scale)) > 0x1p-26f)
        v = {entry(first, scale), entry(first + 1, scale), entry(first + 2, scale), entry(first + 3, scale)};
      *reinterpret_cast<uint4*>(table + first) = v;
    }
  }

  // Whether numbers down to low < 0 and up to high, as bits, are all in the table.
  VS_DEVICE static bool holds(uint32_t low, uint32_t high) {
    return low - 0x8000 < kPatterns && (high < kPatterns || high >= 0x8000);
  }
};

// ---- a thread's share of a row ----

// kLookups: exponentials of a tile that come from the table, the last ones.
template <typename T, bool kEntropy, int kLookups = 0>
struct Share {
  static_assert(kLookups % 2 == 0, "elements come in pairs");
  static constexpr int kComputed = kTile - kLookups;
  uint32_t maximum;  // of the raw logits, packed as they are
  uint32_t high;     // J stays as long as maximum <= high
  uint32_t low;      // negative; what is smaller counts as this
  float magic;       // kMagic - R
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

  VS_DEVICE void slow() {  // every tile rises: no maximum equals this NaN
    high = 0xffffffffu;
    low = 0xffffffffu;  // and nothing is raised to this
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

  // Zero: the maximum so far needs no new J, and clamped logits can be added as they are.
  VS_DEVICE uint32_t rises() const {
    if constexpr (T::kBytes == 4)  // a NaN is not high
      return bits(max_nan_f32(from_bits(maximum), from_bits(high))) ^ high;
    else
      return T::max2(maximum, high) ^ high;
  }

  // Raises to low what is below. The bits of negative numbers grow with their size as unsigned integers, above those of
  // all positive ones, so that a tile with nothing to raise is known by fewer instructions than raising takes.
  VS_DEVICE void clamp(uint32_t (&w)[kWords<T>]) const {
    uint32_t most = low;
#pragma unroll
    for (int i = 0; i < kWords<T>; i += 2)
      most = T::kBytes == 4 ? __vimax3_u32(w[i], w[i + 1], most) : __vimax3_u16x2(w[i], w[i + 1], most);
    if (most == low) return;
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) {
      if constexpr (T::kBytes == 4)
        w[i] = bits(max_nan_f32(from_bits(w[i]), from_bits(low)));
      else
        w[i] = T::max2(w[i], low);
    }
  }

  // Makes any tile fit for add(): raises J, clamps y. False: there is nothing to add.
  VS_DEVICE bool prepare(float (&y)[kTile], float scale);

  VS_DEVICE void add(const float (&y)[kTile]) {
    float e[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) e[i] = scaled_exp(y[i], magic);
    c.add_positive(static_cast<double>(tree16(e)));
  }

  // The same bits as add(), for a clamped tile that does not rise. place: of the last kLookups logits.
  VS_DEVICE void add_looked_up(const float (&y)[kTile], const uint32_t (&place)[kTile]) {
    float e[kTile];
    const uint32_t minus_R = bits(magic) << 23;  // kMagic's own bits are shifted out
    uint32_t found[kTile];
#pragma unroll
    for (int i = kComputed; i < kTile; ++i) asm("ld.shared.u32 %0, [%1];" : "=r"(found[i]) : "r"(place[i]));
#pragma unroll
    for (int i = 0; i < kComputed; ++i) e[i] = scaled_exp(y[i], magic);
#pragma unroll
    for (int i = kComputed; i < kTile; ++i) e[i] = from_bits(found[i] + minus_R);
    c.add_positive(static_cast<double>(tree16(e)));
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
    if (!kEntropy && J <= 6) {  // there low is negative
      // the largest k of this J is 32 J + 27; nearly all that rounds to it
      const float high_x = div(mul(vocabshard::add(static_cast<float>(32 * J), 27.49f), kLn2f), scale);
      const float low_x = div(mul(static_cast<float>(R + kLowest), kLn2f), scale);
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
        if constexpr (kLookups > 0) h = h < 0x8000u ? min(h, Table<T>::kPatterns - 1) : h;
        hv = T::value(h);
        lv = T::value(l);
      }
      // trusted only where they are seen to hold
      const float top_y = mul(hv, scale), bottom_y = mul(lv, scale);
      bool good = (bits(hv) & 0x7fffffffu) < 0x7f800000u && (bits(lv) & 0x7fffffffu) < 0x7f800000u && lv < 0.0f &&
                  top_y <= kLogitLimit && bottom_y >= -kLogitLimit;
      if constexpr (kLookups > 0) good = good && Table<T>::holds(l, h);
      const int32_t lowest = exp_k(bottom_y) - R;
      if (good && exp_k(top_y) <= 32 * J + 27 && lowest >= kLowestFrom && lowest <= kLowestTo) {
        high = T::kBytes == 4 ? h : h | h << 16;
        low = T::kBytes == 4 ? l : l | l << 16;
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

// Terms below 2^(K - kSpan) are raised to about 2^(K - kSpan - 8) here, not dropped. In the entropy's tree they are
// then at most 2^(K - kSpan), and four additions bring a difference up by 2^100 at most: far below the lowest bit that
// is kept of either sum, which lies above 2^(K - 92).
template <typename T, bool kEntropy, int kLookups>
VS_DEVICE void Share<T, kEntropy, kLookups>::add_with_entropy(const float (&y)[kTile]) {
  float top = y[0];
#pragma unroll
  for (int i = 1; i < kTile; ++i) top = fmaxf(top, y[i]);
  const int32_t K = exp_k(clamp_logit(top));
  // from units of 2^(K - kScale) to units of 2^R
  const int32_t n = K - kScale - (32 * J - kOffset), n_u = K - kScale - (32 * J_u - kOffset);
  if (n_u < -300) return;  // far below the last counter
  const float magic_K = static_cast<float>(12582912 + kScale - K), minus_K = static_cast<float>(-K);
  const float lowest = mul(static_cast<float>(K - kSpan - 8), kLn2f);
  const bool deep = lowest < -kLogitLimit;
  float e[kTile], w[kTile];
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
    float v = fmaxf(y[i], lowest);
    if (deep) v = is_neg_inf(y[i]) ? lowest : clamp_logit(y[i]);
    const float t = fma(v, kLog2e, magic_K);
    const float f = fma(v, kLog2e, vocabshard::add(magic_K, -t));
    e[i] = from_bits(bits(exp_poly(f)) + (bits(t) << 23));
    w[i] = mul(e[i], fma(v, kLog2e, minus_K));
  }
  const float s = tree16(e);
  const double mean =
      vocabshard::add(mul(static_cast<double>(K), static_cast<double>(s)), static_cast<double>(tree16(w)));
  c.add_positive(mul(static_cast<double>(s), pow2(n)));
  u.add_signed(mul(mean, pow2(n_u)));
}

}  // namespace vocabshard::logits
