// Small tuples of integers that warps reduce, and masses of columns in bins.
#pragma once

#include "sampling.h"
#include "sm90/ptx.h"

namespace vocabshard::sm90::sampling {

constexpr unsigned kAllLanes = ~0u;

template <int K>
struct Words {
  int64_t x[K];
};

template <int K>
VS_DEVICE Words<K> of_lane(const Words<K>& mine, int step) {
  Words<K> other;
#pragma unroll
  for (int k = 0; k < K; ++k) other.x[k] = __shfl_xor_sync(kAllLanes, mine.x[k], step);
  return other;
}

struct Larger {
  VS_DEVICE Words<1> operator()(Words<1> a, Words<1> b) const { return a.x[0] > b.x[0] ? a : b; }
};
struct Smaller {
  template <int K>
  VS_DEVICE Words<K> operator()(Words<K> a, Words<K> b) const {  // the first word counts, then the next
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (a.x[k] != b.x[k]) return a.x[k] < b.x[k] ? a : b;
    return a;
  }
};
struct Sum {
  template <int K>
  VS_DEVICE Words<K> operator()(Words<K> a, Words<K> b) const {
#pragma unroll
    for (int k = 0; k < K; ++k) a.x[k] += b.x[k];
    return a;
  }
};

// The sum of what a warp's lanes have, by pieces of which 32 fit into 32 bits. kPieces = 2: where |mine| < 2^53.
template <int kPieces = 3>
VS_DEVICE int64_t sum_of_warp(int64_t mine) {
  constexpr int kBits = 27;
  int64_t sum = 0;
#pragma unroll
  for (int i = 0; i + 1 < kPieces; ++i, mine >>= kBits) {
    const uint32_t piece = static_cast<uint32_t>(mine) & ((1u << kBits) - 1);
    sum += static_cast<int64_t>(__reduce_add_sync(kAllLanes, piece)) << (kBits * i);
  }
  return sum + static_cast<int64_t>(__reduce_add_sync(kAllLanes, static_cast<int32_t>(mine))) *
                   (int64_t{1} << (kBits * (kPieces - 1)));
}

struct alignas(16) Bin {
  uint32_t count, mass[3];  // a mass of 41 bits in three pieces
};

constexpr int kPieceBits = 14;  // 2^18 pieces fit into 32 bits

// sampling.h's mass_of, without fp64: for e^y = p * 2^k in units of 2^(k_max - 40).
VS_DEVICE int64_t mass_fast(float y, int32_t k_max) {
  const Exp exp = exp_split(clamp_logit(y));
  const int32_t n = exp.k - k_max, e = n + kMassBits;
  if (is_neg_inf(y) || n < -kMassSpan || n > 0) return 0;
  const uint32_t b = bits(exp.p);
  if (e <= 22) return bits(add(from_bits(b + (static_cast<uint32_t>(e) << 23)), 0x1p+23f)) - 0x4b000000u;
  const uint32_t m = (b & 0x7fffffu) | 0x800000u;
  const int32_t shift = e + static_cast<int32_t>(b >> 23) - 150;
  if (shift >= 0) return static_cast<int64_t>(m) << shift;
  return (m >> 1) + (m & (m >> 1) & 1);  // half a unit: to even
}

VS_DEVICE void add_mass(Bin& bin, int64_t mass) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const uint32_t piece = static_cast<uint32_t>(mass >> (kPieceBits * i)) & ((1u << kPieceBits) - 1);
    if (piece != 0) atomicAdd(&bin.mass[i], piece);
  }
}

VS_DEVICE void add_to(Bin& bin, uint32_t count, bool by_mass, int64_t mass) {
  atomicAdd(&bin.count, count);
  if (by_mass) add_mass(bin, mass);
}

VS_DEVICE int64_t whole_mass(const Bin& bin) {
  return static_cast<int64_t>(bin.mass[0]) + (static_cast<int64_t>(bin.mass[1]) << kPieceBits) +
         (static_cast<int64_t>(bin.mass[2]) << (2 * kPieceBits));
}

// ceil(P total / 2^30), exactly.
VS_DEVICE int64_t share_of(int64_t P, int64_t total) {
  const int64_t high = total >> 30, low = total & ((int64_t{1} << 30) - 1);
  return P * high + ((P * low + ((int64_t{1} << 30) - 1)) >> 30);
}

}  // namespace vocabshard::sm90::sampling
