// 16 fp32 or int32 lanes in native vectors of the instruction set that this file is compiled for.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "contract.h"
#include "cpu/kernels.h"

namespace vocabshard::cpu {
namespace {  // see kernels.h

using vocabshard::bits;  // beside their lane-wise overloads
using vocabshard::from_bits;

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = kLanes / kWidth;

typedef float NativeF __attribute__((vector_size(4 * kWidth)));
typedef int32_t NativeI __attribute__((vector_size(4 * kWidth)));
typedef uint32_t NativeU __attribute__((vector_size(4 * kWidth)));

#define VS_INLINE static inline __attribute__((always_inline))
#define VS_PARTS for (int i = 0; i < kParts; ++i)

#if defined(__AVX512F__)
VS_INLINE NativeF native_fma(NativeF a, NativeF b, NativeF c) { return (NativeF)_mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
VS_INLINE NativeF native_fma(NativeF a, NativeF b, NativeF c) { return (NativeF)_mm256_fmadd_ps(a, b, c); }
#elif defined(__x86_64__) && !defined(__FMA__)
// No fused instruction: the product is exact in fp64, TwoSum gives the sum's error, rounding the fp64 sum to odd makes
// the second rounding harmless.
VS_INLINE __m128d odd_sum(__m128d p, __m128d c) {
  const __m128d zero = _mm_setzero_pd(), s = _mm_add_pd(p, c), back = _mm_sub_pd(s, p);
  const __m128d error = _mm_add_pd(_mm_sub_pd(p, _mm_sub_pd(s, back)), _mm_sub_pd(c, back));
  const __m128d above = _mm_cmpgt_pd(error, zero);
  const __m128d inexact = _mm_or_pd(above, _mm_cmplt_pd(error, zero));  // a sum that is no number has a NaN error
  const __m128i one = _mm_set1_epi64x(1), word = _mm_castpd_si128(s);
  const __m128i even = _mm_sub_epi64(_mm_and_si128(word, one), one);
  // one step away from zero, or -1 towards it
  const __m128i step = _mm_or_si128(_mm_castpd_si128(_mm_xor_pd(above, _mm_cmpgt_pd(s, zero))), one);
  const __m128i taken = _mm_and_si128(_mm_and_si128(step, even), _mm_castpd_si128(inexact));
  return _mm_castsi128_pd(_mm_add_epi64(word, taken));
}
VS_INLINE NativeF native_fma(NativeF a, NativeF b, NativeF c) {
  const __m128 x = (__m128)a, y = (__m128)b, z = (__m128)c;
  const __m128d low = odd_sum(_mm_mul_pd(_mm_cvtps_pd(x), _mm_cvtps_pd(y)), _mm_cvtps_pd(z));
  const __m128d high = odd_sum(_mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(x, x)), _mm_cvtps_pd(_mm_movehl_ps(y, y))),
                               _mm_cvtps_pd(_mm_movehl_ps(z, z)));
  return (NativeF)_mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
}
#else
VS_INLINE NativeF native_fma(NativeF a, NativeF b, NativeF c) {
  NativeF r;
  for (int i = 0; i < kWidth; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
#endif

struct I {
  NativeI v[kParts];
};
struct F {
  NativeF v[kParts];
};

VS_INLINE NativeF native_set(float x) { return x - NativeF{}; }
VS_INLINE NativeF native_load(const float* x) {
  NativeF r;
  __builtin_memcpy(&r, x, sizeof r);
  return r;
}
VS_INLINE void native_store(float* out, NativeF x) { __builtin_memcpy(out, &x, sizeof x); }

#define VS_LANES(type, expression) \
  type r;                          \
  VS_PARTS r.v[i] = expression;    \
  return r

VS_INLINE F set(float x) { VS_LANES(F, native_set(x)); }
VS_INLINE I set_int(int32_t x) { VS_LANES(I, x - NativeI{}); }
VS_INLINE F load(const float* x) { VS_LANES(F, native_load(x + i * kWidth)); }
VS_INLINE void store(float* out, F x) { VS_PARTS native_store(out + i * kWidth, x.v[i]); }
VS_INLINE I load_int(const int32_t* x) {
  I r;
  __builtin_memcpy(&r, x, sizeof r);
  return r;
}
VS_INLINE void store_int(int32_t* out, I x) { __builtin_memcpy(out, &x, sizeof x); }

VS_INLINE F operator+(F a, F b) { VS_LANES(F, a.v[i] + b.v[i]); }
VS_INLINE F operator-(F a, F b) { VS_LANES(F, a.v[i] - b.v[i]); }
VS_INLINE F operator*(F a, F b) { VS_LANES(F, a.v[i] * b.v[i]); }
VS_INLINE F operator/(F a, F b) { VS_LANES(F, a.v[i] / b.v[i]); }
VS_INLINE F operator-(F a) { VS_LANES(F, -a.v[i]); }
VS_INLINE F fma(F a, F b, F c) { VS_LANES(F, native_fma(a.v[i], b.v[i], c.v[i])); }

// Integers wrap around.
VS_INLINE I operator+(I a, I b) { VS_LANES(I, (NativeI)((NativeU)a.v[i] + (NativeU)b.v[i])); }
VS_INLINE I operator-(I a, I b) { VS_LANES(I, (NativeI)((NativeU)a.v[i] - (NativeU)b.v[i])); }
VS_INLINE I operator&(I a, I b) { VS_LANES(I, a.v[i] & b.v[i]); }
VS_INLINE I operator|(I a, I b) { VS_LANES(I, a.v[i] | b.v[i]); }
VS_INLINE I operator~(I a) { VS_LANES(I, ~a.v[i]); }
VS_INLINE I shift_left(I a, int n) { VS_LANES(I, (NativeI)((NativeU)a.v[i] << n)); }
VS_INLINE I shift_right(I a, int n) { VS_LANES(I, a.v[i] >> n); }

// Comparisons give -1 or 0 a lane; a comparison with a NaN is false.
VS_INLINE I less(F a, F b) { VS_LANES(I, (NativeI)(a.v[i] < b.v[i])); }
VS_INLINE I less_equal(F a, F b) { VS_LANES(I, (NativeI)(a.v[i] <= b.v[i])); }
VS_INLINE I equal(F a, F b) { VS_LANES(I, (NativeI)(a.v[i] == b.v[i])); }
VS_INLINE I less(I a, I b) { VS_LANES(I, (NativeI)(a.v[i] < b.v[i])); }
VS_INLINE I equal(I a, I b) { VS_LANES(I, (NativeI)(a.v[i] == b.v[i])); }

VS_INLINE F select(I mask, F yes, F no) { VS_LANES(F, mask.v[i] ? yes.v[i] : no.v[i]); }
VS_INLINE I select(I mask, I yes, I no) { VS_LANES(I, mask.v[i] ? yes.v[i] : no.v[i]); }
VS_INLINE bool any(I mask) {
  NativeI m = mask.v[0];
  for (int i = 1; i < kParts; ++i) m |= mask.v[i];
  int32_t r = 0;
  for (int i = 0; i < kWidth; ++i) r |= m[i];
  return r != 0;
}

VS_INLINE I bits(F x) { VS_LANES(I, (NativeI)x.v[i]); }
VS_INLINE F from_bits(I x) { VS_LANES(F, (NativeF)x.v[i]); }
VS_INLINE F to_float(I x) { VS_LANES(F, __builtin_convertvector(x.v[i], NativeF)); }

}  // namespace
}  // namespace vocabshard::cpu
