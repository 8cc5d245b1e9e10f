// Backward over logits that exist: every element is read once and its gradient written once, the bytes of the CPU
// kernels (csrc/cpu/softmax.h, step for step).
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

#include "sm90/check.h"
#include "sm90/logits.h"
#include "sm90/logits_element.cuh"

namespace vocabshard::sm90::logits {

constexpr float kVanishes = -125.0f;  // binary exponent below which a probability counts as 0

struct BackwardParams {
  const char* logits;
  char* out;
  int64_t logits_stride, out_stride;  // bytes of a row
  int64_t rows;                       // N
  int32_t columns, valid;
  uint32_t chunks;  // of a row
  const int64_t* first;
  const int64_t* order;
  RowInputs inputs;
  int64_t vocab_start;
  RowGradients gradients;
  LogitsUpstream upstream;
};

// What an output row sends to its row of logits.
template <bool kEntropy>
struct RowTerms {
  float minus_int, frac, power, scale;  // power: 2^-frac
  float target, softmax, entropy_grad, entropy;
  int32_t column;  // of the target, or -1
  bool active, plain;

  VS_DEVICE void load(const BackwardParams& p, int64_t m) {
    const RowGradients& g = p.gradients;
    const int64_t id = p.inputs.target_ids[m], local = id - p.vocab_start;
    entropy_grad = 0.0f;
    if (g.softmax != nullptr) {
      target = g.target[m];
      softmax = g.softmax[m];
      if constexpr (kEntropy) entropy_grad = g.entropy[m];
    } else {
      const LogitsUpstream& u = p.upstream;
      const bool scored = id != u.ignore_index && id >= 0 && id < u.real_vocab_size;
      target = u.logp != nullptr && scored ? u.logp[m * u.logp_stride] : 0.0f;
      softmax = u.lse != nullptr ? add(u.lse[m * u.lse_stride], -target) : -target;
      if constexpr (kEntropy) entropy_grad = u.entropy[m * u.entropy_stride];
    }
    entropy = kEntropy ? g.row_entropy[m] : 0.0f;
    minus_int = -static_cast<float>(g.lse2_int[m]);
    frac = g.lse2_frac[m];
    power = exp_poly(-frac);
    scale = p.inputs.inv_temperature ? p.inputs.inv_temperature[m] : p.inputs.scalar_inv_temperature;
    column = local >= 0 && local < p.valid ? static_cast<int32_t>(local) : -1;
    active = target != 0.0f || softmax != 0.0f || entropy_grad != 0.0f;
    // then logits below -2^20 and -inf come to p = 0 and to a zero without being looked at
    const float largest = from_bits(0x7f800000u);
    plain = fabsf(softmax) < largest && fabsf(entropy_grad) < largest && !is_nan(frac) && !is_nan(scale) &&
            minus_int < kLogitLimit && !kEntropy;
  }

  // kPlain: plain, and not the target's column.
  template <bool kScaled, bool kPlain>
  VS_DEVICE float gradient(float z, bool is_target) const {
    const float y = kScaled ? mul(z, scale) : z;
    // p = P(f) 2^(k - lse2_int) 2^-lse2_frac: unlike 2^(y c - lse2) as accurate where p is small as where it is large
    const float v = kPlain ? y : fmaxf(y, -kLogitLimit);
    const float t = fma(v, kLog2e, kMagic);
    const float f = fma(v, kLog2e, add(kMagic, -t));
    const float shift = add(t, minus_int);  // kMagic + n, n = k - lse2_int
    float p = from_bits(bits(mul(exp_poly(f), power)) + (bits(shift) << 23));
    p = shift < kMagic + kVanishes ? 0.0f : p;
    float share = softmax;
    if constexpr (kEntropy) {  // log p + H, the large parts first: they cancel
      const float n = add(shift, -kMagic);
      constexpr float kLn2f = static_cast<float>(kLn2);
      share = add(softmax, -mul(entropy_grad, fma(add(f, -frac), kLn2f, fma(n, kLn2f, entropy))));
    }
    float dz = fma(p, share, !kPlain && is_target ? target : 0.0f);
    if (kScaled) dz = mul(dz, scale);
    if constexpr (!kPlain) {
      if (is_nan(frac)) return frac;
      if (is_neg_inf(y)) return 0.0f;
    }
    return dz;
  }
};

template <typename T>
constexpr int kOfVector = 16 / T::kBytes;  // elements

// Gradients of neighbouring elements from column `column` on, in place of their values. Padding gets zeros.
template <bool kEntropy, bool kScaled, bool kIndexed, int n>
VS_DEVICE void differentiate(const BackwardParams& p, const RowTerms<kEntropy>& row, int64_t begin, int64_t end,
                             int32_t column, float (&x)[n]) {
  if constexpr (kIndexed) {
    float sum[n];
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] = 0.0f;
    for (int64_t j = begin; j < end; ++j) {
      RowTerms<kEntropy> one;
      one.load(p, p.order[j]);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float d = one.active ? one.template gradient<kScaled, false>(x[i], column + i == one.column) : 0.0f;
        sum[i] = j == begin ? d : add(sum[i], d);
      }
    }
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = sum[i];
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = row.template gradient<kScaled, false>(x[i], column + i == row.column);
  }
  if (column + n > p.valid) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = column + i < p.valid ? x[i] : 0.0f;
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
      w[i] = T::pack2(x[2 * i], x[2 * i + 1]);
  }
  return {w[0], w[1], w[2], w[3]};
}

template <typename T>
VS_DEVICE void store_element(char* p, float x) {
  if constexpr (T::kBytes == 4)
    *reinterpret_cast<float*>(p) = x;
  else
    *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(T::pack2(x, 0.0f));
}

// The part of a row that a block takes: vectors [first, last) of the row, which are aligned in the output; with the
// row's first part, also the elements before the first vector and after the last.
template <typename T>
struct Part {
  const char* in;  // of vector 0
  char* out;
  int32_t head, vectors, first, last;
  bool alike;  // vectors are aligned in the input, too

  VS_DEVICE Part(const BackwardParams& p, uint32_t row, uint32_t chunk, int32_t size) {
    in = p.logits + row * p.logits_stride;
    out = p.out + row * p.out_stride;
    alike = ((reinterpret_cast<uintptr_t>(in) ^ reinterpret_cast<uintptr_t>(out)) & 15u) == 0;
    head = min(static_cast<int32_t>((0 - reinterpret_cast<uintptr_t>(out)) & 15u) / T::kBytes, p.columns);
    vectors = (p.columns - head) / kOfVector<T>;
    first = static_cast<int32_t>(chunk) * size;
    last = min(first + size, vectors);
    in += head * T::kBytes;
    out += head * T::kBytes;
  }
  VS_DEVICE int32_t column(int32_t vector) const { return head + vector * kOfVector<T>; }
  VS_DEVICE static int64_t offset(int32_t vector) { return static_cast<int64_t>(vector) * 16; }
};

// Blocks go from the last part to the first: what the forward read last is still in the L2.
template <typename T, bool kEntropy, bool kScaled, bool kIndexed, int kThreads, int kVectors, int kRounds>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ BackwardParams p) {
  constexpr int n = kOfVector<T>;
  const uint32_t unit = gridDim.x - 1 - blockIdx.x, row = unit / p.chunks, chunk = unit % p.chunks;
  const Part<T> part(p, row, chunk, kThreads * kVectors * kRounds);
  const int32_t id = static_cast<int32_t>(threadIdx.x);
  int64_t begin = 0, end = 0;
  RowTerms<kEntropy> terms;
  bool active = false;
  int32_t plain_last = 0, target_vector = -1;  // vectors before it, but for the target's, need no care
#pragma unroll 1
  for (int32_t first = part.first + id; first < part.last || first == part.first + id; first += kThreads * kVectors) {
    uint4 v[kVectors];  // all in flight at once
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t at = first + i * kThreads;
      if (part.alike && at < part.last) v[i] = *reinterpret_cast<const uint4*>(part.in + part.offset(at));
    }
    if (first == part.first + id) {
      if constexpr (kIndexed) {
        begin = p.first[row];
        end = p.first[row + 1];
        active = end > begin;
      } else {
        terms.load(p, row);
        active = terms.active;
        if (terms.plain && part.alike) plain_last = min(part.last, (p.valid - part.head) / n);
        if (terms.column >= part.head) target_vector = (terms.column - part.head) / n;
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t at = first + i * kThreads;
      if (at >= part.last) break;
      float x[n] = {};
      if (active) {
        const uint32_t w[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
        unpack<T>(w, x);
        if (!kIndexed && at < plain_last && at != target_vector) {
#pragma unroll
          for (int j = 0; j < n; ++j) x[j] = terms.template gradient<kScaled, true>(x[j], false);
        } else {
#pragma unroll
          for (int j = 0; j < n; ++j)
            if (!part.alike) x[j] = load_element<T>(part.in + part.offset(at) + j * T::kBytes);
          differentiate<kEntropy, kScaled, kIndexed>(p, terms, begin, end, part.column(at), x);
        }
      }
      *reinterpret_cast<uint4*>(part.out + part.offset(at)) = pack_vector<T>(x);
    }
  }
  const int32_t lone = p.columns - part.vectors * n;
  if (chunk == 0 && id < lone) {
    const int32_t column = id < part.head ? id : id + part.vectors * n, from = (column - part.head) * T::kBytes;
    float x[1] = {0.0f};
    if (active) {
      x[0] = load_element<T>(part.in + from);
      differentiate<kEntropy, kScaled, kIndexed>(p, terms, begin, end, column, x);
    }
    store_element<T>(part.out + from, x[0]);
  }
}

template <typename T, bool kEntropy, bool kScaled, bool kIndexed, int kThreads, int kVectors, int kRounds>
void launch_backward(BackwardParams params, cudaStream_t stream) {
  constexpr int64_t kChunk = static_cast<int64_t>(kThreads) * kVectors * kRounds * kOfVector<T>;
  params.chunks = static_cast<uint32_t>((params.columns + kChunk - 1) / kChunk);
  const int64_t blocks = params.rows * params.chunks;
  if (blocks > 0x7fffffff) throw std::invalid_argument("backward over logits: more than 2^31 blocks");
  backward_kernel<T, kEntropy, kScaled, kIndexed, kThreads, kVectors, kRounds>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  check_launch("backward over logits");
}

}  // namespace vocabshard::sm90::logits
