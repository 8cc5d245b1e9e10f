// Places of columns, masses and clocks of docs/operators/sampling.md, one text for host and device.
//
// As in contract.h every operation is one IEEE rounding and nothing may be contracted.
#pragma once

#include "contract.h"

namespace vocabshard {

// ---- constants (vocabshard/sampling.py holds the same; a test compares them) ----

constexpr int kMassBits = 40;  // a mass is an integer in units of 2^-40 of a term with k = k_max
constexpr int kMassSpan = 64;  // terms this far below are 0
constexpr int kRadixShift[3] = {21, 10, 0}, kRadixBits[3] = {11, 11, 10};
constexpr int32_t kEveryTie = 0x7fffffff;
constexpr int64_t kKeepAll = INT64_MIN, kNoArrival = INT64_MAX;
constexpr float kSqrt2Single = 0x1.6a09e6p+0f;

// E = -log2(1 - t) = s * L(s^2), s = t / (2 - t): 2 / ((2i + 1) ln 2)
constexpr float kClock0 = 0x1.715476p+1f, kClock1 = 0x1.ec709ep-1f, kClock2 = 0x1.2776c6p-1f, kClock3 = 0x1.a61762p-2f,
                kClock4 = 0x1.484b14p-2f;

constexpr uint32_t kPhiloxM0 = 0xd2511f53u, kPhiloxM1 = 0xcd9e8d57u, kPhiloxW0 = 0x9e3779b9u, kPhiloxW1 = 0xbb67ae85u;
constexpr int kPhiloxRounds = 10;

// ---- places ----

// Ascending with z; the two zeros are one.
VS_HD int32_t order_of(float z) {
  const int32_t s = static_cast<int32_t>(bits(add(z, 0.0f)));
  return s ^ ((s >> 31) & 0x7fffffff);
}
VS_HD float logit_of(int32_t order) { return from_bits(static_cast<uint32_t>(order ^ ((order >> 31) & 0x7fffffff))); }

// Larger is better: larger z, then lower id.
VS_HD int64_t place_of(float z, int64_t id) {
  return static_cast<int64_t>(order_of(z)) * (int64_t{1} << 32) + (kEveryTie - id);
}

// A cut as two words: left out is z < logit, or z == logit and id > tie. NaN is kept.
VS_HD float cut_logit(int64_t cut) { return cut == kKeepAll ? neg_inf() : logit_of(static_cast<int32_t>(cut >> 32)); }
VS_HD int32_t cut_tie(int64_t cut) {
  return cut == kKeepAll ? kEveryTie : kEveryTie - static_cast<int32_t>(cut & 0x7fffffff);
}
VS_HD bool is_cut(float z, int64_t id, float logit, int32_t tie) { return z < logit || (z == logit && id > tie); }

VS_HD uint32_t radix_key(float z) { return static_cast<uint32_t>(order_of(z)) ^ 0x80000000u; }

// ---- masses ----

VS_HD int64_t mass_of(float y, int32_t k_max) {
  const Exp e = exp_split(clamp_logit(y));
  const int32_t n = e.k - k_max;
  if (!(y > neg_inf()) || n < -kMassSpan || n > 0) return 0;  // above the maximum only in rows that are not usable
  const double scale = from_bits(static_cast<uint64_t>(1023 + n + kMassBits) << 52);
  const double m = mul(static_cast<double>(e.p), scale);
#if defined(__CUDA_ARCH__)
  return __double2ll_rn(m);
#else
  return __builtin_llrint(m);
#endif
}

// ---- clocks ----

struct Philox {
  uint32_t word[4];
};

// The whole product of two words.
VS_HD uint64_t wide(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

VS_HD Philox philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int i = 0; i < kPhiloxRounds; ++i) {
    const uint64_t a = wide(kPhiloxM0, c0), b = wide(kPhiloxM1, c2);
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// The four words of columns 4 * group ... 4 * group + 3; tag 1: their second words.
VS_HD Philox column_words(int64_t group, uint32_t tag, int64_t seed, int64_t row) {
  const uint64_t s = static_cast<uint64_t>(seed), r = static_cast<uint64_t>(row);
  return philox(static_cast<uint32_t>(group), tag, static_cast<uint32_t>(r), static_cast<uint32_t>(r >> 32),
                static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32));
}

constexpr uint32_t kSecondBelow = 256;  // a word below asks for a second one

VS_HD float clock_series(float s) {
  const float w = mul(s, s);
  float l = fma(kClock4, w, kClock3);
  l = fma(l, w, kClock2);
  l = fma(l, w, kClock1);
  return mul(s, fma(l, w, kClock0));
}

// An exponential variable in units of 1 / ln 2. second counts where x < kSecondBelow.
VS_HD float clock_of(uint32_t x, uint32_t second) {
  if (x < 0x40000000u) {
    float t;
    if (x < kSecondBelow)
      t = mul(add(static_cast<float>((static_cast<uint64_t>(x) << 32) | second), 0.5f), 0x1p-64f);
    else
      t = mul(add(static_cast<float>(x), 0.5f), 0x1p-32f);
    return clock_series(div(t, add(2.0f, -t)));
  }
  const uint32_t b = bits(add(static_cast<float>(~x), 0.5f));
  int32_t a = static_cast<int32_t>(b >> 23) - 127;
  float r = from_bits((b & 0x7fffffu) | 0x3f800000u);
  if (r > kSqrt2Single) {
    r = mul(r, 0.5f);
    a += 1;
  }
  return add(static_cast<float>(32 - a), -clock_series(div(add(r, -1.0f), add(r, 1.0f))));
}

// When the clock of a column with this y goes off, as an integer that orders like E / e^y.
VS_HD int64_t arrival_of(float clock, float y) {
  const Exp e = exp_split(clamp_logit(y));
  return static_cast<int64_t>(bits(div(clock, e.p))) - static_cast<int64_t>(e.k) * (1 << 23);
}

}  // namespace vocabshard
