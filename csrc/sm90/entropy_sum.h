// The entropy value of a tile, K s + d rounded to 53 bits, nearly always without fp64: while the tensor cores work,
// each fp64 operation of a warp waits some 700 cycles for them (measured). The same text runs in a host test.
#pragma once

#include "contract.h"

namespace vocabshard::sm90 {

// (-1)^negative m 2^e, m < 2^53
struct EntropyValue {
  uint64_t m;
  int32_t e;
  bool negative;
};

// contract.h's own way.
VS_HD EntropyValue entropy_value_fp64(int32_t K, float s, float d) {
  const double value = add(mul(static_cast<double>(K), static_cast<double>(s)), static_cast<double>(d));
  const uint64_t b = bits(value);
  const int32_t e = static_cast<int32_t>((b >> 52) & 0x7ff);
  return {e == 0 ? 0 : (b & 0xfffffffffffffull) | 0x10000000000000ull, e - 1075, (b >> 63) != 0};
}

// s and d as integers in units of the smaller one's last place: if the sum fits in 53 bits, nothing is rounded. It does
// unless d is far below s, which is itself a sum that d's terms are part of.
// K = 0 is d alone, however small: tiles of logits near 0 would else be the other case, all of them.
VS_HD EntropyValue entropy_value(int32_t K, float s, float d) {
  constexpr int32_t kMost = 17;  // K's 21 bits and the mantissa's 24 stay below 2^63
  const uint32_t bs = bits(s), bd = bits(d);
  const int32_t es = static_cast<int32_t>(bs >> 23), ed = static_cast<int32_t>((bd >> 23) & 0xff);
  const int32_t ms = static_cast<int32_t>((bs & 0x7fffff) | 0x800000);
  int32_t md = static_cast<int32_t>((bd & 0x7fffff) | 0x800000);
  int32_t over = K == 0 ? 0 : es - ed;
  if (static_cast<int32_t>(bd) < 0) md = -md;
  if (ed == 0) md = 0, over = -1;
  const int32_t left = over < 0 ? 0 : (over > kMost ? kMost : over), other = over < 0 ? -over & 31 : 0;
  const int64_t x = static_cast<int64_t>(static_cast<uint64_t>(static_cast<int64_t>(K) * ms) << left) +
                    static_cast<int32_t>(static_cast<uint32_t>(md) << other);
  const bool negative = x < 0;
  const uint64_t m = static_cast<uint64_t>(negative ? -x : x);
  if (over > kMost || (m >> 53) != 0) return entropy_value_fp64(K, s, d);
  return {m, (over < 0 ? es : ed) - 150, negative};
}

}  // namespace vocabshard::sm90
