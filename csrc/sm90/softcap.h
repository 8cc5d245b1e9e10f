// contract.h's softcap with divisions that need no branch: the same bytes for kFastFrom <= |z| <= 1 / kFastFrom and cap
// within kSoftcapFastFrom ... 1 / kSoftcapFastFrom.
#pragma once

#include "contract.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

constexpr float kFastFrom = 0x1p-80f, kSoftcapFastFrom = 0x1p-40f;  // no residual is ever subnormal

// a / b correctly rounded, where the reciprocal of b is: after one correction the quotient is faithful, and a second
// one rounds a faithful quotient correctly (Markstein, IBM J. Res. Dev. 34, 1990).
VS_DEVICE float divide(float a, float b, float reciprocal) {
  const float first = mul(a, reciprocal), second = fma(fma(-first, b, a), reciprocal, first);
  return fma(fma(-second, b, a), reciprocal, second);
}

VS_DEVICE float softcap_fast(float z, float cap, float inverse) {
  const float u = divide(z, cap, inverse), a = fabsf(u), u2 = mul(u, u);
  const float small = fma(mul(u, u2), fma(fma(kTanh3, u2, kTanh2), u2, kTanh1), u);
  const float capped = fminf(a, kTanhOne);
  const Exp e = exp_split(add(capped, capped));
  const float d = add(1.0f, scale_pow2(e.p, e.k));  // 2 ... 2^47
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(d));
  reciprocal = fma(fma(-d, reciprocal, 1.0f), reciprocal, reciprocal);
  // the one mantissa for which this may end half a unit too low
  if ((bits(d) & 0x7fffffu) == 0x7fffffu) reciprocal = from_bits(bits(reciprocal) | 1u);
  const float large = add(1.0f, -divide(2.0f, d, reciprocal));
  return mul(cap, a < kTanhSmall ? small : copysignf(large, u));
}

}  // namespace vocabshard::sm90
