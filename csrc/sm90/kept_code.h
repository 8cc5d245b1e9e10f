// The 16 bits that the forward keeps of a y, so that the backward need not make the logit again. The same text runs in
// a host test.
//
// The columns of a group of 64 share, in each row, an integer R between 0.18 and 1.32 above the largest y c among them
// (c = fp32(log2 e)). What is kept is the depth d = R - y c: in steps of 2^-12 down to 12, of 2^-8 from there to 76. So
// p = 2^(R - d - lse2) has a relative error of at most 2^-13.5 where it matters, a 22nd of what rounding dz to bf16 may
// add, and log2 p an absolute one of 2^-13. Code 0 stands for what lies deeper, and for -inf: p is 0 exactly. A group
// is coded by itself: no code depends on tiles, batch or launch.
#pragma once

#include <cmath>

#include "contract.h"

namespace vocabshard::sm90 {

// code = max(kFineTop - 4096 d, kCoarseTop - 256 d, 0); both lines meet at d = 12, code 16384.
constexpr float kFineSteps = 4096.0f, kFineTop = 65536.0f, kCoarseSteps = 256.0f, kCoarseTop = 19456.0f;
constexpr float kLeastReference = -2097152.0f;  // -2^21: below any finite y c; NaN and -inf give this one

VS_HD float kept_reference(float y_max) {
  // a quarter is above what this FMA may round off, so that no code reaches 2^16
  return fmaxf(add(floorf(fma(y_max, kLog2e, 0.25f)), 1.0f), kLeastReference);
}

struct KeptScale {
  float fine, coarse;  // exact: integers of at most 22 bits, times the steps
};

VS_HD KeptScale kept_scale(float reference) {
  return {fma(reference, -kFineSteps, kMagic + kFineTop), fma(reference, -kCoarseSteps, kMagic + kCoarseTop)};
}

// In the low half. kMagic makes integers of both; NaN and what lies too deep are code 0.
VS_HD uint32_t kept_code(float y, const KeptScale& scale) {
  const float fine = fma(y, kLog2e * kFineSteps, scale.fine), coarse = fma(y, kLog2e * kCoarseSteps, scale.coarse);
  return bits(fmaxf(fmaxf(fine, coarse), kMagic));
}

// log2 p from a code, `base` = R - lse2; -200, whose power of 2 is 0, from code 0.
VS_HD float kept_log2_p(uint32_t code, float base) {
  const float x = add(from_bits(0x4b000000u | code), -8388608.0f);
  const float fine = fma(x, 1.0f / kFineSteps, add(base, -kFineTop / kFineSteps));
  const float coarse = fma(x, 1.0f / kCoarseSteps, add(base, -kCoarseTop / kCoarseSteps));
  return code == 0 ? -200.0f : fmaxf(fminf(fine, coarse), -200.0f);
}

}  // namespace vocabshard::sm90
