// A target's logit alone: a warp multiplies eight rows of hidden by their targets' eight rows of weight, and keeps the
// diagonal. The chain of a logit is the same in every tile, so these are the forward's bytes.
#include "sampling.h"
#include "sm90/check.h"
#include "sm90/epilogue.h"
#include "sm90/mma_sync.h"
#include "sm90/params.h"
#include "sm90/ptx.h"
#include "sm90/topk.h"

namespace vocabshard::sm90 {

namespace {

constexpr int kRows = 8, kSteps = 8;  // of k = 16 that are loaded at a time, as those before are multiplied

// Two elements of a row that has `left` from there on; 0 behind its end.
VS_DEVICE uint32_t load_pair(const uint16_t* at, int64_t left) {
  if (left >= 2) return *reinterpret_cast<const uint32_t*>(at);
  return left == 1 ? *at : 0u;
}

template <class Element>
VS_DEVICE void step(float (&c)[4], uint32_t h0, uint32_t h8, uint32_t w0, uint32_t w8) {
  const uint32_t a[4] = {h0, 0, h8, 0}, b[2] = {w0, w8};
  mma<Element>(c, a, b);
}

VS_DEVICE void load_steps(uint32_t (&x)[kSteps][4], const uint16_t* h, const uint16_t* w) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    x[s][0] = *reinterpret_cast<const uint32_t*>(h + 16 * s);
    x[s][1] = *reinterpret_cast<const uint32_t*>(h + 16 * s + 8);
    x[s][2] = *reinterpret_cast<const uint32_t*>(w + 16 * s);
    x[s][3] = *reinterpret_cast<const uint32_t*>(w + 16 * s + 8);
  }
}

template <class Element>
__global__ void __launch_bounds__(32) target_kernel(const __grid_constant__ TopkTarget p, int32_t bias_type) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, q = lane % 4;
  const int64_t row = min(int64_t{blockIdx.x} * kRows + g, p.rows - 1);
  const int64_t id = p.target_ids[row], local = id - p.vocab_start;
  const bool here = local >= 0 && local < p.valid;
  const uint16_t* const h = static_cast<const uint16_t*>(p.hidden) + row * p.hidden_row + 2 * q;
  const uint16_t* const w = here ? static_cast<const uint16_t*>(p.weight) + local * p.weight_row + 2 * q : h;
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const int64_t whole = p.depth / (16 * kSteps) * (16 * kSteps);
  uint32_t x[kSteps][4];
  if (whole > 0) load_steps(x, h, w);
#pragma unroll 2
  for (int64_t k = 0; k < whole; k += 16 * kSteps) {
    uint32_t next[kSteps][4];
    const int64_t ahead = k + 16 * kSteps < whole ? k + 16 * kSteps : k;
    load_steps(next, h + ahead, w + ahead);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      step<Element>(c, x[s][0], x[s][1], x[s][2], x[s][3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[s][i] = next[s][i];
    }
  }
#pragma unroll 1
  for (int64_t k = whole; k < p.depth; k += 16) {
    const int64_t left = p.depth - k - 2 * q;
    step<Element>(c, load_pair(h + k, left), load_pair(h + k + 8, left - 8), load_pair(w + k, left),
                  load_pair(w + k + 8, left - 8));
  }
  if (q != g / 2 || int64_t{blockIdx.x} * kRows + g >= p.rows) return;
  float z = g % 2 == 0 ? c[0] : c[1];
  int64_t place = kKeepAll;
  if (here) {
    if (bias_type != kBiasNone) z = add(z, load_bias(p.bias, bias_type, local));
    if (p.softcap != 0.0f) z = softcap(z, p.softcap);
    place = place_of(z, id);
  }
  p.place[row] = place;
}

}  // namespace

void launch_topk_target(const TopkTarget& call, cudaStream_t stream) {
  if (call.rows == 0) return;
  const auto blocks = static_cast<unsigned>((call.rows + kRows - 1) / kRows);
  const int32_t bias = bias_type(call.bias, call.bias_element);
  if (call.element == kHalf)
    target_kernel<__half><<<blocks, 32, 0, stream>>>(call, bias);
  else
    target_kernel<__nv_bfloat16><<<blocks, 32, 0, stream>>>(call, bias);
  check_launch("targets' logits");
}

}  // namespace vocabshard::sm90
