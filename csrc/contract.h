// The numeric contract vocabshard-logp-v1, one text for host and device.
//
// Everything after the logit is defined here: exponential, tile tree, exact counters, special values, fold.
// Every operation is one IEEE rounding; nothing may be contracted (host: -ffp-contract=off, device: -fmad=false and the
// _rn intrinsics below). Kernels may arrange the work differently as long as the bytes of the record are the same.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define VS_HD __host__ __device__ __forceinline__
#else
#define VS_HD static inline  // internal: each instruction set keeps a copy of its own
#endif

namespace vocabshard {

// ---- constants (vocabshard/contract.py holds the same; a test compares them) ----

constexpr const char* kContractId = "vocabshard-logp-v1";
constexpr int kTile = 16;                           // columns whose terms meet in one fp32 tree
constexpr int kLimbBits = 32;                       // width of a counter's position
constexpr int kLimbs = 3;                           // positions a partial keeps
constexpr int kScale = 96;                          // terms are scaled by 2^(kScale - K): see "Terms" below
constexpr int kSpan = 196;                          // terms with k < K - kSpan are dropped
constexpr int kHeadroom = 4;                        // 16 terms of at most sqrt(2): bits up to k_max + 4
constexpr int kEntropyHeadroom = 26;                // times |K - f| < 2^21: bits up to k_max + 25
constexpr int32_t kEmptyK = -(1 << 25);             // k_max of a partial without finite logits: J = -2^20
constexpr float kLogitLimit = 1048576.0f;           // 2^20: beyond it a maximum poisons its row
constexpr float kLog2e = 0x1.715476p+0f;            // c = fp32(log2 e)
constexpr double kInvLog2e = 0x1.62e4303f1ff27p-1;  // fp64(1 / c)
constexpr double kLn2 = 0x1.62e42fefa39efp-1;
constexpr double kSqrt2 = 0x1.6a09e667f3bcdp+0;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr int32_t kMagicBits = 0x4b400000;

constexpr int kExpDegree = 6;  // 2^f on [-1/2, 1/2], P(0) = 1; error 0.80 ulp over every f
constexpr float kExp1 = 0x1.62e430p-1f, kExp2 = 0x1.ebfbdcp-3f, kExp3 = 0x1.c6af7cp-5f, kExp4 = 0x1.3b2de0p-7f,
                kExp5 = 0x1.5f0830p-10f, kExp6 = 0x1.416b5cp-13f;

// tanh(u) = u + u^3 Q(u^2) for |u| < 1/4
constexpr float kTanh1 = -0x1.555516p-2f, kTanh2 = 0x1.10e0f4p-3f, kTanh3 = -0x1.a5380ep-5f;
constexpr float kTanhSmall = 0.25f, kTanhOne = 16.0f;  // from kTanhOne on the fp32 result is 1

// log2 r = s * L(s^2), s = (r - 1) / (r + 1): the series of 2 atanh(s) / ln 2
constexpr int kLog2Terms = 11;
#define VS_LOG2_COEFFICIENTS                                                               \
  {0x1.71547652b82fep+1, 0x1.ec709dc3a03fdp-1, 0x1.2776c50ef9bfep-1, 0x1.a61762a7aded9p-2, \
   0x1.484b13d7c02a9p-2, 0x1.0c9a84994022dp-2, 0x1.c68f568d31760p-3, 0x1.89f3b1694cffep-3, \
   0x1.5b9ac9b743f0dp-3, 0x1.3703c1f4d0ffep-3, 0x1.1964ec6fc9491p-3}

// ---- single operations ----

VS_HD uint32_t bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
#endif
}
VS_HD float from_bits(uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(b);
#else
  float x;
  std::memcpy(&x, &b, 4);
  return x;
#endif
}
VS_HD uint64_t bits(double x) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint64_t>(__double_as_longlong(x));
#else
  uint64_t b;
  std::memcpy(&b, &x, 8);
  return b;
#endif
}
VS_HD double from_bits(uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(b));
#else
  double x;
  std::memcpy(&x, &b, 8);
  return x;
#endif
}

#if defined(__CUDA_ARCH__)
VS_HD float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
VS_HD float add(float a, float b) { return __fadd_rn(a, b); }
VS_HD float mul(float a, float b) { return __fmul_rn(a, b); }
VS_HD float div(float a, float b) { return __fdiv_rn(a, b); }
VS_HD double add(double a, double b) { return __dadd_rn(a, b); }
VS_HD double mul(double a, double b) { return __dmul_rn(a, b); }
VS_HD double div(double a, double b) { return __ddiv_rn(a, b); }
#else
VS_HD float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
VS_HD float add(float a, float b) { return a + b; }
VS_HD float mul(float a, float b) { return a * b; }
VS_HD float div(float a, float b) { return a / b; }
VS_HD double add(double a, double b) { return a + b; }
VS_HD double mul(double a, double b) { return a * b; }
VS_HD double div(double a, double b) { return a / b; }
#endif

constexpr uint32_t kNanBits = 0x7fc00000u;  // the only NaN a record or a result holds
constexpr uint32_t kNegInfBits = 0xff800000u;

VS_HD float quiet_nan() { return from_bits(kNanBits); }
VS_HD float neg_inf() { return from_bits(kNegInfBits); }
VS_HD bool is_nan(float x) { return (bits(x) & 0x7fffffffu) > 0x7f800000u; }
VS_HD bool is_neg_inf(float x) { return bits(x) == kNegInfBits; }

// A maximum that keeps a NaN from either side.
VS_HD float max_nan(float a, float b) { return is_nan(a) ? a : (b <= a ? a : b); }

// ---- from the logit to y ----

// tanh by one formula on every machine; only for finite u.
VS_HD float tanh_pinned(float u);

// ---- exp ----

struct Exp {
  int32_t k;  // nearest integer to y * c
  float p;    // 2^(y * c - k)
};

VS_HD float exp_poly(float f) {
  float p = fma(kExp6, f, kExp5);
  p = fma(p, f, kExp4);
  p = fma(p, f, kExp3);
  p = fma(p, f, kExp2);
  p = fma(p, f, kExp1);
  return fma(p, f, 1.0f);
}

// Finite logits below -2^20 count as -2^20. A NaN stays.
VS_HD float clamp_logit(float y) { return y < -kLogitLimit ? -kLogitLimit : y; }

// e^y = p * 2^k for |y| <= 2^20.
VS_HD Exp exp_split(float y) {
  const float t = fma(y, kLog2e, kMagic);
  const float f = fma(y, kLog2e, add(kMagic, -t));  // kMagic - t = -k exactly
  return {static_cast<int32_t>(bits(t) - static_cast<uint32_t>(kMagicBits)), exp_poly(f)};
}

VS_HD int32_t exp_k(float y) {
  return static_cast<int32_t>(bits(fma(y, kLog2e, kMagic)) - static_cast<uint32_t>(kMagicBits));
}

// p * 2^n by exponent arithmetic; the caller keeps the result normal.
VS_HD float scale_pow2(float p, int32_t n) { return from_bits(bits(p) + (static_cast<uint32_t>(n) << 23)); }

VS_HD float tanh_pinned(float u) {
  const float a = u < 0.0f ? -u : u;
  const float u2 = mul(u, u);
  const float small = fma(mul(u, u2), fma(fma(kTanh3, u2, kTanh2), u2, kTanh1), u);
  const float capped = a < kTanhOne ? a : kTanhOne;
  const Exp e = exp_split(add(capped, capped));
  const float large = add(1.0f, -div(2.0f, add(1.0f, scale_pow2(e.p, e.k))));
  return a < kTanhSmall ? small : (u < 0.0f ? -large : large);
}

// cap * tanh(z / cap); infinities and NaN pass, so that a mask stays a mask and a poison a poison.
VS_HD float softcap(float z, float cap) {
  const bool finite = (bits(z) & 0x7fffffffu) < 0x7f800000u;
  return finite ? mul(cap, tanh_pinned(div(z, cap))) : z;
}

// ---- Terms, tile tree ----
//
// Terms of a tile are p * 2^(k - K + kScale), K the tile's own largest k (any K from there up to the partial's k_max
// gives the same kept bits). The scale keeps the smallest kept term normal: four levels of the tree absorb 25 bits each
// below the lowest kept bit, so no flush and no clamp can tip a rounding that is kept.

VS_HD float term(float y, Exp e, int32_t K) {
  const int32_t n = e.k - K;
  return (n < -kSpan || is_neg_inf(y)) ? 0.0f : scale_pow2(e.p, n + kScale);
}

VS_HD float tree16(const float* t) {
  const float a0 = add(add(t[0], t[1]), add(t[2], t[3])), a1 = add(add(t[4], t[5]), add(t[6], t[7]));
  const float b0 = add(add(t[8], t[9]), add(t[10], t[11])), b1 = add(add(t[12], t[13]), add(t[14], t[15]));
  return add(add(a0, a1), add(b0, b1));
}

// ---- counters ----

VS_HD int32_t limb_top(int32_t k_max) { return (k_max + kHeadroom) >> 5; }
VS_HD int32_t limb_top_entropy(int32_t k_max) { return (k_max + kEntropyHeadroom) >> 5; }

// k_max of a maximum that does not poison (-inf: the identity).
VS_HD int32_t k_of_max(float y_max) { return is_neg_inf(y_max) ? kEmptyK : exp_k(clamp_logit(y_max)); }

// Moves counters whose top position is J to J + rise, rise >= 0: the lowest drop out.
VS_HD void counters_raise(int64_t* c, int32_t rise) {
  if (rise == 0) return;
  c[2] = rise == 1 ? c[1] : (rise == 2 ? c[0] : 0);
  c[1] = rise == 1 ? c[0] : 0;
  c[0] = 0;
}

// Adds m * 2^q, cut at multiples of 32, to the counters of positions J, J - 1, J - 2. m < 2^53.
VS_HD void counters_add(int64_t* c, int32_t J, uint64_t m, int32_t q, bool negative) {
  const int32_t top = J - (q >> 5);  // counter index of the lowest limb
  const int r = q & 31;
  const uint64_t low = m << r;                         // limbs 0 and 1, as far as they fit
  const uint64_t high = r == 0 ? 0 : (m >> (64 - r));  // what the shift pushed out: limb 2
  const int64_t limb[3] = {static_cast<int64_t>(low & 0xffffffffu), static_cast<int64_t>(low >> 32),
                           static_cast<int64_t>(high)};
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < kLimbs; ++j)
      if (j == top - i) c[j] += negative ? -limb[i] : limb[i];
}

// A tile's value s * 2^(K - kScale), s >= 0 normal or zero.
VS_HD void counters_add_tile(int64_t* c, int32_t J, float s, int32_t K) {
  const uint32_t b = bits(s);
  if (b == 0) return;
  counters_add(c, J, (b & 0x7fffffu) | 0x800000u, static_cast<int32_t>(b >> 23) - 150 + K - kScale, false);
}

// A tile's entropy value u * 2^(K - kScale), u = fp64 K * s + d.
VS_HD void counters_add_entropy(int64_t* c, int32_t J, double u, int32_t K) {
  const uint64_t b = bits(u);
  const int32_t e = static_cast<int32_t>((b >> 52) & 0x7ff);
  if (e == 0) return;
  counters_add(c, J, (b & 0xfffffffffffffull) | 0x10000000000000ull, e - 1075 + K - kScale, (b >> 63) != 0);
}

// ---- a partial: what one rank knows of a row ----

struct Partial {
  float y_max;        // NaN absorbs; -inf: the identity; NaN or above 2^20: the row is poisoned
  float y_target;     // NaN: the target is not here
  int64_t c[kLimbs];  // sum of exponentials
  int64_t u[kLimbs];  // sum of e^y * (y c), with entropy only
};

VS_HD bool poisons(float y_max) { return !(y_max <= kLogitLimit); }

VS_HD Partial partial_identity() { return {neg_inf(), quiet_nan(), {0, 0, 0}, {0, 0, 0}}; }

// Raises the maximum; counters move when their top position does.
VS_HD void partial_raise(Partial& p, float y_max) {
  const float raised = max_nan(p.y_max, y_max);
  if (!poisons(raised)) {
    const int32_t before = k_of_max(p.y_max), after = k_of_max(raised);
    counters_raise(p.c, limb_top(after) - limb_top(before));
    counters_raise(p.u, limb_top_entropy(after) - limb_top_entropy(before));
  }
  p.y_max = raised;
}

// One tile of valid columns; missing columns are -inf.
template <bool kEntropy>
VS_HD void partial_add_tile(Partial& p, const float* y) {
  float y_max = y[0];
  for (int i = 1; i < kTile; ++i) y_max = max_nan(y_max, y[i]);
  partial_raise(p, y_max);
  if (poisons(p.y_max) || is_neg_inf(y_max)) return;
  const int32_t K = exp_k(clamp_logit(y_max));
  float e[kTile], w[kTile];
  for (int i = 0; i < kTile; ++i) {
    const float v = clamp_logit(y[i]);
    e[i] = term(y[i], exp_split(v), K);
    if (kEntropy) w[i] = e[i] == 0.0f ? 0.0f : mul(e[i], fma(v, kLog2e, static_cast<float>(-K)));
  }
  const float s = tree16(e);
  const int32_t k_max = k_of_max(p.y_max);
  counters_add_tile(p.c, limb_top(k_max), s, K);
  if (kEntropy) {
    // K * s is exact in fp64 (21 + 24 bits), so this is the fused value
    const double u = add(mul(static_cast<double>(K), static_cast<double>(s)), static_cast<double>(tree16(w)));
    counters_add_entropy(p.u, limb_top_entropy(k_max), u, K);
  }
}

VS_HD void partial_merge(Partial& p, const Partial& other) {
  const float y_max = p.y_max;
  partial_raise(p, other.y_max);
  if (is_nan(p.y_target)) p.y_target = other.y_target;
  if (poisons(p.y_max) || poisons(y_max)) return;
  Partial o = other;
  partial_raise(o, p.y_max);
  for (int i = 0; i < kLimbs; ++i) {
    p.c[i] += o.c[i];
    p.u[i] += o.u[i];
  }
}

// The canonical bytes: one NaN, one zero (which of -0 and +0 is larger would depend on order), nothing beside a poison.
VS_HD void partial_finish(Partial& p) {
  p.y_max = add(p.y_max, 0.0f);
  if (is_nan(p.y_max)) p.y_max = quiet_nan();
  if (is_nan(p.y_target)) p.y_target = quiet_nan();
  if (poisons(p.y_max))
    for (int i = 0; i < kLimbs; ++i) p.c[i] = p.u[i] = 0;
}

// The record of a row and rank: words of int64, word w of row n at [w * N + n].
constexpr int kRecordWords = 1 + kLimbs, kRecordWordsEntropy = 1 + 2 * kLimbs;

VS_HD int64_t pack_word0(float y_max, float y_target) {
  return static_cast<int64_t>((static_cast<uint64_t>(bits(y_target)) << 32) | bits(y_max));
}

template <bool kEntropy>
VS_HD void record_store(int64_t* records, int64_t stride, const Partial& p) {
  records[0] = pack_word0(p.y_max, p.y_target);
  for (int i = 0; i < kLimbs; ++i) {
    records[(1 + i) * stride] = p.c[i];
    if (kEntropy) records[(1 + kLimbs + i) * stride] = p.u[i];
  }
}

template <bool kEntropy>
VS_HD Partial record_load(const int64_t* records, int64_t stride) {
  Partial p = partial_identity();
  const uint64_t word = static_cast<uint64_t>(records[0]);
  p.y_max = from_bits(static_cast<uint32_t>(word));
  p.y_target = from_bits(static_cast<uint32_t>(word >> 32));
  for (int i = 0; i < kLimbs; ++i) {
    p.c[i] = records[(1 + i) * stride];
    if (kEntropy) p.u[i] = records[(1 + kLimbs + i) * stride];
  }
  return p;
}

// ---- fold: from the merged partial to the results ----

struct Log2 {
  int32_t a;  // x = 2^a * r, sqrt(1/2) < r <= sqrt(2)
  double l;   // log2 r
};

VS_HD Log2 log2_split(double x) {
  const double coefficients[kLog2Terms] = VS_LOG2_COEFFICIENTS;
  const uint64_t b = bits(x);
  int32_t a = static_cast<int32_t>(b >> 52) - 1023;
  double r = from_bits(static_cast<uint64_t>((b & 0xfffffffffffffull) | 0x3ff0000000000000ull));
  if (r > kSqrt2) {
    r = mul(r, 0.5);
    a += 1;
  }
  const double s = div(add(r, -1.0), add(r, 1.0)), z = mul(s, s);
  double l = coefficients[kLog2Terms - 1];
  for (int i = kLog2Terms - 2; i >= 0; --i) l = add(mul(l, z), coefficients[i]);
  return {a, mul(s, l)};
}

// The counters as a double in units of 2^(32 (J - 1)).
VS_HD double counters_value(const int64_t* c) {
  const double low = add(static_cast<double>(c[1]), mul(static_cast<double>(c[2]), 0x1p-32));
  return add(mul(static_cast<double>(c[0]), 0x1p+32), low);
}

struct Folded {
  float logp, lse, entropy;
  int32_t lse2_int;  // lse * c = lse2_int + lse2_frac, for the backward; |lse2_frac| <= 1/2
  float lse2_frac;   // NaN: a poisoned row
};

enum Target : int { kTargetScored = 0, kTargetIgnored = 1, kTargetInvalid = 2 };

// What an ignored or invalid target gives instead of its log-prob.
VS_HD float logp_of(int target, bool invalid_is_nan, float scored) {
  if (target == kTargetIgnored) return 0.0f;
  if (target == kTargetInvalid) return invalid_is_nan ? quiet_nan() : 0.0f;
  return scored;
}

// What the logarithms of a fold are of.
struct FoldOf {
  double sum;    // of exponentials
  double ratio;  // 2^n sum / p, n such that 2^n sum is in [1, 2), p that of the target's exp
};

// Whatever the row is: fold_finish looks at neither logarithm where it has none.
VS_HD FoldOf fold_of(const Partial& p) {
  const double sum = counters_value(p.c);
  const double m = from_bits(static_cast<uint64_t>((bits(sum) & 0xfffffffffffffull) | 0x3ff0000000000000ull));
  return {sum, div(m, static_cast<double>(exp_split(p.y_target).p))};
}

template <bool kEntropy>
VS_HD Folded fold_finish(const Partial& p, int target, bool invalid_is_nan, const FoldOf& of, const Log2& log_sum,
                         const Log2& log_ratio) {
  const float nan = quiet_nan();
  if (is_neg_inf(p.y_max)) return {logp_of(target, invalid_is_nan, neg_inf()), neg_inf(), 0.0f, 0, 0.0f};
  if (poisons(p.y_max) || p.y_max <= -kLogitLimit) return {logp_of(target, invalid_is_nan, nan), nan, nan, 0, nan};

  const int32_t k_max = k_of_max(p.y_max), J = limb_top(k_max);
  const int32_t lse2_int = log_sum.a + 32 * (J - 1);
  const double lse2 = add(static_cast<double>(lse2_int), log_sum.l);
  Folded out = {nan, static_cast<float>(mul(lse2, kInvLog2e)), 0.0f, lse2_int, static_cast<float>(log_sum.l)};

  double x;
  if (is_neg_inf(p.y_target)) {
    out.logp = neg_inf();
  } else if (!is_nan(p.y_target)) {
    if (p.y_target < -kLogitLimit) {
      x = mul(add(mul(static_cast<double>(p.y_target), static_cast<double>(kLog2e)), -lse2), kLn2);
    } else {
      // of m / p_t, not log2 m - log2 p_t: the target's own rounding cancels
      const int32_t e = static_cast<int32_t>(bits(of.sum) >> 52) - 1023;
      x = -mul(add(static_cast<double>(e + 32 * (J - 1) - exp_k(p.y_target) + log_ratio.a), log_ratio.l), kLn2);
    }
    out.logp = add(x < 0.0 ? static_cast<float>(x) : 0.0f, 0.0f);  // nvcc makes a minimum of it, which keeps -0
  }
  out.logp = logp_of(target, invalid_is_nan, out.logp);

  if (kEntropy) {
    const int32_t J_u = limb_top_entropy(k_max);
    const double scale = J_u == J ? 1.0 : 0x1p+32;
    const double mean = mul(div(counters_value(p.u), of.sum), scale);
    const double h = mul(add(lse2, -mean), kLn2);
    out.entropy = h > 0.0 ? static_cast<float>(h) : 0.0f;
  }
  return out;
}

template <bool kEntropy>
VS_HD Folded fold_finish(const Partial& p, int target, bool invalid_is_nan) {
  const FoldOf of = fold_of(p);
  return fold_finish<kEntropy>(p, target, invalid_is_nan, of, log2_split(of.sum), log2_split(of.ratio));
}

}  // namespace vocabshard
