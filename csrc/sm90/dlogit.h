// The gradient of one logit from it and the terms of its row.
#pragma once

#include "contract.h"
#include "sm90/dlogits.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90 {

// Plain: no temperature, no gradient of the entropy, no softcap. Scaled: no softcap.
enum DlogitsKind : int32_t { kPlainDlogits = 0, kScaledDlogits = 1, kCappedDlogits = 2 };

// The terms that every column of a row needs; those of the target are read where it is.
VS_DEVICE DlogitsRow load_row(const DlogitsRow* at) {
  DlogitsRow row = {};
  const float4 a = ptx::load_float4(at);
  row.minus_int = a.x, row.frac = a.y, row.factor = a.z, row.slope = a.w;
  const float4 b = ptx::load_float4(reinterpret_cast<const float4*>(at) + 1);
  row.scale = b.x, row.target = static_cast<int32_t>(bits(b.z)), row.keep = bits(b.w);
  return row;
}

VS_DEVICE float log2_p(float y, const DlogitsRow& row) { return add(fma(y, kLog2e, row.minus_int), -row.frac); }

VS_DEVICE float soft_cap_slope(float capped, float inverse_cap) {
  const float tanh = mul(capped, inverse_cap);
  return ptx::is_infinite(capped) ? 0.0f : fma(-tanh, tanh, 1.0f);
}

template <DlogitsKind kKind>
VS_DEVICE float dlogit(float capped, const DlogitsRow& row, float inverse_cap) {
  if constexpr (kKind == kPlainDlogits) {
    return mul(ptx::exp2(log2_p(capped, row)), row.factor);
  } else {
    // from 2^-200 on p is 0, and -inf would make NaN of it; a NaN dropped here is in row.factor
    const float l = fmaxf(log2_p(mul(capped, row.scale), row), -200.0f);
    const float d = mul(ptx::exp2(l), fma(row.slope, l, row.factor));
    return kKind == kCappedDlogits ? mul(d, soft_cap_slope(capped, inverse_cap)) : d;
  }
}

// The target's: near p = 1 by p - 1, which keeps the digits that p itself has lost.
template <DlogitsKind kKind>
VS_DEVICE float dlogit_target(float capped, const DlogitsRow& row, float target_grad, float inverse_cap) {
  constexpr bool kPlain = kKind == kPlainDlogits;
  const float y = kPlain ? capped : mul(capped, row.scale);
  if (is_neg_inf(y)) return 0.0f;
  const float l = log2_p(y, row), factor = kPlain ? row.factor : fma(row.slope, l, row.factor);
  float d;
  if (l > -0.5f && l < 0.5f) {
    float p = fma(kExp6, l, kExp5);
    p = fma(p, l, kExp4);
    p = fma(p, l, kExp3);
    p = fma(p, l, kExp2);
    p = mul(fma(p, l, kExp1), l);
    d = fma(factor, p, add(factor, target_grad));
  } else {
    d = fma(factor, ptx::exp2(fmaxf(l, -200.0f)), target_grad);
    if (is_nan(l)) d = l;
  }
  return kKind == kCappedDlogits ? mul(d, soft_cap_slope(capped, inverse_cap)) : d;
}

}  // namespace vocabshard::sm90
