// Backward over logits that exist: every element is read once and its gradient written once.
//
// With log2 p = fma(y, c, -lse2_int) - lse2_frac and p by ex2.approx (its bits are nobody's contract; an element's own
// computation is the same in every launch, so the gradient does not depend on batch or layout).
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

#include "sm90/check.h"
#include "sm90/logits.h"
#include "sm90/logits_tile.cuh"

namespace vocabshard::logits {

struct BackwardParams {
  const char* logits;
  char* out;
  int64_t logits_stride, out_stride;  // bytes of a row
  int64_t rows;                       // N
  int64_t columns, valid;
  uint32_t chunks;  // of a row
  uint32_t shares;  // in which the forward read the rows, each from its beginning on
  const int64_t* first;
  const int64_t* order;
  RowInputs inputs;
  int64_t vocab_start;
  RowGradients gradients;
  LogitsUpstream upstream;
};

// What an output row contributes to its row of logits.
template <bool kEntropy>
struct RowCoefficients {
  float minus_int, frac, scale;
  float target, softmax;         // times scale
  float minus_entropy, entropy;  // -gradient times scale; H
  int64_t column;                // of the target, or -1
  bool active, poisoned, finite;

  VS_DEVICE void load(const BackwardParams& p, int64_t m) {
    const RowGradients& g = p.gradients;
    const int64_t id = p.inputs.target_ids[m], local = id - p.vocab_start;
    float grad_target, grad_softmax, grad_entropy = 0.0f;
    if (g.softmax != nullptr) {
      grad_target = g.target[m];
      grad_softmax = g.softmax[m];
      if constexpr (kEntropy) grad_entropy = g.entropy[m];
    } else {
      const LogitsUpstream& u = p.upstream;
      const bool scored = id != u.ignore_index && id >= 0 && id < u.real_vocab_size;
      grad_target = u.logp != nullptr && scored ? u.logp[m * u.logp_stride] : 0.0f;
      grad_softmax = u.lse != nullptr ? add(u.lse[m * u.lse_stride], -grad_target) : -grad_target;
      if constexpr (kEntropy) grad_entropy = u.entropy[m * u.entropy_stride];
    }
    minus_int = -static_cast<float>(g.lse2_int[m]);
    frac = g.lse2_frac[m];
    column = local >= 0 && local < p.valid ? local : -1;
    scale = p.inputs.inv_temperature ? p.inputs.inv_temperature[m] : p.inputs.scalar_inv_temperature;
    active = grad_target != 0.0f || grad_softmax != 0.0f || grad_entropy != 0.0f;
    poisoned = is_nan(frac);
    target = mul(grad_target, scale);
    softmax = mul(grad_softmax, scale);
    minus_entropy = -mul(grad_entropy, scale);
    entropy = kEntropy ? g.row_entropy[m] : 0.0f;
    finite = fabsf(softmax) < from_bits(0x7f800000u);
  }

  VS_DEVICE float gradient(float x, bool is_target) const {
    const float y = mul(x, scale);
    const float t = add(fma(y, kLog2e, minus_int), -frac);
    float p;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p) : "f"(t));
    float d;
    if constexpr (kEntropy) {
      d = mul(p, fma(minus_entropy, fma(t, kLn2f, entropy), softmax));
      if (is_neg_inf(y) && !poisoned) d = 0.0f;
    } else {
      d = mul(p, softmax);
      if (!finite && is_neg_inf(y) && !poisoned) d = 0.0f;
    }
    if (is_target && (!is_neg_inf(y) || poisoned)) d = add(d, target);
    return d;
  }
};

template <typename T>
struct Element;
template <>
struct Element<BF16> {
  using Store = uint16_t;
  VS_DEVICE static uint32_t pack2(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
};
template <>
struct Element<F16> {
  using Store = uint16_t;
  VS_DEVICE static uint32_t pack2(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
};
template <>
struct Element<F32> {
  using Store = uint32_t;
};

template <typename T>
constexpr int kOfVector = 16 / T::kBytes;  // elements

template <typename T>
VS_DEVICE void unpack_vector(uint4 v, float (&x)[kOfVector<T>]) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (T::kBytes == 4) {
      x[i] = from_bits(w[i]);
    } else {
      x[2 * i] = T::value(w[i] & 0xffffu);
      x[2 * i + 1] = T::value(w[i] >> 16);
    }
  }
}

template <typename T>
VS_DEVICE uint4 pack_vector(const float (&x)[kOfVector<T>]) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (T::kBytes == 4)
      w[i] = bits(x[i]);
    else
      w[i] = Element<T>::pack2(x[2 * i], x[2 * i + 1]);
  }
  return {w[0], w[1], w[2], w[3]};
}

// Gradients of neighbouring elements from column `column` on, in place of their values. Padding gets zeros.
template <bool kEntropy, bool kIndexed, int n>
VS_DEVICE void differentiate(const BackwardParams& p, const RowCoefficients<kEntropy>& row, int64_t begin, int64_t end,
                             int64_t column, float (&x)[n]) {
  if constexpr (kIndexed) {
    float sum[n];
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] = 0.0f;
    bool any = false;
    for (int64_t j = begin; j < end; ++j) {
      RowCoefficients<kEntropy> one;
      one.load(p, p.order[j]);
      if (!one.active) continue;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float d = one.gradient(x[i], column + i == one.column);
        sum[i] = any ? add(sum[i], d) : d;
      }
      any = true;
    }
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = sum[i];
  } else if (row.column >= column && row.column < column + n) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = row.gradient(x[i], column + i == row.column);
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = row.gradient(x[i], false);
  }
  if (column + n > p.valid) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = column + i < p.valid ? x[i] : 0.0f;
  }
}

template <typename T>
VS_DEVICE float load_element(const char* p) {
  if constexpr (T::kBytes == 4)
    return *reinterpret_cast<const float*>(p);
  else
    return T::value(*reinterpret_cast<const uint16_t*>(p));
}

template <typename T>
VS_DEVICE void store_element(char* p, float x) {
  if constexpr (T::kBytes == 4)
    *reinterpret_cast<float*>(p) = x;
  else
    *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(Element<T>::pack2(x, 0.0f));
}

VS_DEVICE uint4 load_once(const char* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

VS_DEVICE void store_once(char* p, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Which unit a block takes: the last of every share of the forward, then the last but one, and so on. What the forward
// read last is still in the L2. False: this share has fewer units.
VS_DEVICE bool unit_of(uint32_t block, uint64_t units, uint32_t shares, uint64_t& unit) {
  const uint32_t share = block % shares, back = block / shares;
  const uint64_t whole = units / shares, rest = units % shares;
  const uint64_t begin = whole * share + rest * share / shares, end = whole * (share + 1) + rest * (share + 1) / shares;
  unit = end - 1 - back;
  return end - begin > back;
}

// A block takes one chunk of kThreads * kVectors vectors of a row, all in flight at once; vectors are aligned in the
// output, the elements before the first and after the last go one by one with chunk 0.
template <typename T, bool kEntropy, bool kIndexed, int kThreads, int kVectors, bool kEarly, bool kOnce>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ BackwardParams p) {
  constexpr int n = kOfVector<T>;
  uint64_t unit;
  if (!unit_of(blockIdx.x, static_cast<uint64_t>(p.rows) * p.chunks, p.shares, unit)) return;
  const int64_t row = static_cast<int64_t>(unit / p.chunks);
  const uint32_t chunk = static_cast<uint32_t>(unit % p.chunks);
  const char* in = p.logits + row * p.logits_stride;
  char* out = p.out + row * p.out_stride;
  const int64_t head = min(static_cast<int64_t>((0 - reinterpret_cast<uintptr_t>(out)) & 15u) / T::kBytes, p.columns);
  const int64_t vectors = (p.columns - head) / n;
  const bool alike = ((reinterpret_cast<uintptr_t>(in) ^ reinterpret_cast<uintptr_t>(out)) & 15u) == 0;

  uint4 v[kVectors];
  const int64_t first = static_cast<int64_t>(chunk) * (kThreads * kVectors) + threadIdx.x;
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = first + i * kThreads;
      const char* from = in + (head + at * n) * T::kBytes;
      if (at < vectors) v[i] = kOnce ? load_once(from) : *reinterpret_cast<const uint4*>(from);
    }
  };
  if (kEarly && alike) load();

  int64_t begin = 0, end = 0;
  RowCoefficients<kEntropy> coefficients;
  bool active;
  if constexpr (kIndexed) {
    begin = p.first[row];
    end = p.first[row + 1];
    active = end > begin;
  } else {
    coefficients.load(p, row);
    active = coefficients.active;
  }
  if (!kEarly && active && alike) load();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = first + i * kThreads, column = head + at * n;
    if (at >= vectors) break;
    uint4 result = {0, 0, 0, 0};
    if (active) {
      float x[n];
      if (alike) {
        unpack_vector<T>(v[i], x);
      } else {
#pragma unroll
        for (int j = 0; j < n; ++j) x[j] = load_element<T>(in + (column + j) * T::kBytes);
      }
      differentiate<kEntropy, kIndexed>(p, coefficients, begin, end, column, x);
      result = pack_vector<T>(x);
    }
    char* to = out + column * T::kBytes;
    if constexpr (kOnce)
      store_once(to, result);
    else
      *reinterpret_cast<uint4*>(to) = result;
  }
  if (chunk == 0) {
    const int64_t after = head + vectors * n, lone = head + (p.columns - after);
    if (threadIdx.x < lone) {
      const int64_t column = threadIdx.x < head ? threadIdx.x : after + (threadIdx.x - head);
      float x[1] = {0.0f};
      if (active) {
        x[0] = load_element<T>(in + column * T::kBytes);
        differentiate<kEntropy, kIndexed>(p, coefficients, begin, end, column, x);
      }
      store_element<T>(out + column * T::kBytes, x[0]);
    }
  }
}

template <typename T, bool kEntropy, bool kIndexed, int kThreads = 256, int kVectors = 4, bool kEarly = false,
          bool kOnce = false>
void launch_backward(BackwardParams params, cudaStream_t stream) {
  constexpr int64_t kChunk = static_cast<int64_t>(kThreads) * kVectors * kOfVector<T>;
  params.chunks = static_cast<uint32_t>((params.columns + kChunk - 1) / kChunk);
  const int64_t units = params.rows * params.chunks;
  params.shares = static_cast<uint32_t>(min(static_cast<int64_t>(params.shares), units));
  const int64_t blocks = (units + params.shares - 1) / params.shares * params.shares;
  if (blocks > 0x7fffffff) throw std::invalid_argument("backward over logits: more than 2^31 blocks");
  backward_kernel<T, kEntropy, kIndexed, kThreads, kVectors, kEarly, kOnce>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  sm90::check_launch("backward over logits");
}

}  // namespace vocabshard::logits
