// From the chain to y, to the states, and back to the gradient of the logits; contract.h lane by lane.
#pragma once

#include "cpu/lanes.h"

namespace vocabshard::cpu {
namespace {

VS_INLINE I is_nan(F x) { return ~equal(x, x); }
VS_INLINE I is_neg_inf(F x) { return equal(bits(x), set_int(static_cast<int32_t>(kNegInfBits))); }
VS_INLINE I poisons(F x) { return ~less_equal(x, set(kLogitLimit)); }
VS_INLINE F max_nan(F a, F b) { return select(is_nan(a) | less_equal(b, a), a, b); }
VS_INLINE F clamp_logit(F y) { return select(less(y, set(-kLogitLimit)), set(-kLogitLimit), y); }

VS_INLINE F exp_poly(F f) {
  F p = fma(set(kExp6), f, set(kExp5));
  p = fma(p, f, set(kExp4));
  p = fma(p, f, set(kExp3));
  p = fma(p, f, set(kExp2));
  p = fma(p, f, set(kExp1));
  return fma(p, f, set(1.0f));
}

VS_INLINE I magic_integer(F t) { return bits(t) - set_int(kMagicBits); }
VS_INLINE I exp_k(F y) { return magic_integer(fma(y, set(kLog2e), set(kMagic))); }
VS_INLINE F exp_split(F y, I* k) {
  const F t = fma(y, set(kLog2e), set(kMagic));
  *k = magic_integer(t);
  return exp_poly(fma(y, set(kLog2e), set(kMagic) - t));
}
VS_INLINE F scale_pow2(F p, I n) { return from_bits(bits(p) + shift_left(n, 23)); }

// tanh u, and its slope 1 - tanh^2: from the rest to 1 where tanh is large, so that nothing cancels.
VS_INLINE F tanh_pinned(F u, F* slope) {
  const F zero = set(0.0f), one = set(1.0f), two = set(2.0f);
  const I negative = less(u, zero);
  const F a = select(negative, -u, u), u2 = u * u;
  const F small = fma(u * u2, fma(fma(set(kTanh3), u2, set(kTanh2)), u2, set(kTanh1)), u);
  const F capped = select(less(a, set(kTanhOne)), a, set(kTanhOne));
  I k;
  const F p = exp_split(capped + capped, &k);
  const F rest = two / (one + scale_pow2(p, k)), large = one - rest;
  const F th = select(less(a, set(kTanhSmall)), small, select(negative, -large, large));
  *slope = select(less(a, set(0.5f)), fma(-th, th, one), rest * (two - rest));
  return th;
}

VS_INLINE I is_finite(F z) { return less(bits(z) & set_int(0x7fffffff), set_int(0x7f800000)); }
VS_INLINE F softcap(F z, F cap, F* slope) { return select(is_finite(z), cap * tanh_pinned(z / cap, slope), z); }

// The logit before temperature of column v.
VS_INLINE F logit(const Block& b, F chain, int64_t v) {
  const F z = b.bias ? chain + set(b.bias[v]) : chain;
  F slope;
  return b.softcap != 0.0f ? softcap(z, set(b.softcap), &slope) : z;
}

// What a truncation leaves out of column v's logits becomes -inf; a NaN stays.
VS_INLINE F without_cut(const PanelRows& rows, F z, int64_t column) {
  const F limit = load(rows.cut_logit);
  const I beyond = less(load_int(rows.cut_column), set_int(static_cast<int32_t>(column)));
  const I out = less(z, limit) | (equal(z, limit) & beyond);
  return select(out, from_bits(set_int(static_cast<int32_t>(kNegInfBits))), z);
}

static void finish_logits(const Block& b) {
  if (!b.bias && b.softcap == 0.0f) return;
  for (int64_t v = 0; v < b.columns; ++v)
    for (int64_t p = 0; p < b.panels; ++p) {
      float* z = b.z + v * b.ld + p * kLanes;
      store(z, logit(b, load(z), v));
    }
}

template <class T>
VS_INLINE T tree16(const T* t) {
  const T a0 = (t[0] + t[1]) + (t[2] + t[3]), a1 = (t[4] + t[5]) + (t[6] + t[7]);
  const T b0 = (t[8] + t[9]) + (t[10] + t[11]), b1 = (t[12] + t[13]) + (t[14] + t[15]);
  return (a0 + a1) + (b0 + b1);
}

VS_INLINE I k_of_max(F y) { return select(is_neg_inf(y), set_int(kEmptyK), exp_k(clamp_logit(y))); }

// counters_add_tile for 16 rows; s is zero where nothing is to be added. m << r stays below 2^55: two limbs.
static void add_terms(int64_t (*c)[kLanes], const int32_t* top, const float* s, const int32_t* K) {
  for (int l = 0; l < kLanes; ++l) {
    uint32_t b;
    __builtin_memcpy(&b, s + l, 4);
    const int32_t q = static_cast<int32_t>((b >> 23) + static_cast<uint32_t>(K[l]) - (150 + kScale));
    const uint64_t m = b == 0 ? 0 : (b & 0x7fffffu) | 0x800000u;
    const uint64_t low = m << (q & 31);
    const int64_t limb0 = static_cast<int64_t>(low & 0xffffffffu), limb1 = static_cast<int64_t>(low >> 32);
    const int32_t at = top[l] - (q >> 5);
    for (int j = 0; j < kLimbs; ++j) c[j][l] += (at == j ? limb0 : 0) + (at - 1 == j ? limb1 : 0);
  }
}

template <bool kEntropy>
VS_INLINE void add_tile(PanelState& state, const F* y) {
  F tile_max = y[0];
  for (int i = 1; i < kTile; ++i) tile_max = max_nan(tile_max, y[i]);
  const F before = load(state.y_max), raised = max_nan(before, tile_max);
  const I live = ~(poisons(raised) | is_neg_inf(tile_max));
  if (any(~less_equal(raised, before))) {
    store(state.y_max, raised);
    alignas(64) int32_t k_max[kLanes], raise[kLanes];
    store_int(k_max, k_of_max(raised));
    store_int(raise, ~poisons(raised));
    for (int l = 0; l < kLanes; ++l) {
      if (!raise[l]) continue;
      int64_t c[kLimbs] = {state.c[0][l], state.c[1][l], state.c[2][l]};
      const int32_t top = limb_top(k_max[l]);
      counters_raise(c, top - state.top[l]);
      for (int j = 0; j < kLimbs; ++j) state.c[j][l] = c[j];
      state.top[l] = top;
      if (!kEntropy) continue;
      int64_t u[kLimbs] = {state.u[0][l], state.u[1][l], state.u[2][l]};
      const int32_t top_entropy = limb_top_entropy(k_max[l]);
      counters_raise(u, top_entropy - state.top_entropy[l]);
      for (int j = 0; j < kLimbs; ++j) state.u[j][l] = u[j];
      state.top_entropy[l] = top_entropy;
    }
  }
  if (!any(live)) return;

  const I K = exp_k(clamp_logit(tile_max));
  F e[kTile], w[kTile];
  for (int i = 0; i < kTile; ++i) {
    const F v = clamp_logit(y[i]);
    I k;
    const F p = exp_split(v, &k);
    const I n = k - K;
    const I dropped = less(n, set_int(-kSpan)) | is_neg_inf(y[i]);
    e[i] = select(dropped, set(0.0f), scale_pow2(p, n + set_int(kScale)));
    if (kEntropy)
      w[i] = select(equal(bits(e[i]), set_int(0)), set(0.0f), e[i] * fma(v, set(kLog2e), to_float(set_int(0) - K)));
  }
  alignas(64) float s[kLanes];
  alignas(64) int32_t tile_k[kLanes];
  store(s, select(live, tree16(e), set(0.0f)));
  store_int(tile_k, K);
  add_terms(state.c, state.top, s, tile_k);
  if (!kEntropy) return;
  alignas(64) float d[kLanes];
  store(d, tree16(w));
  for (int l = 0; l < kLanes; ++l) {
    if (s[l] == 0.0f) continue;
    const double u = add(mul(static_cast<double>(tile_k[l]), static_cast<double>(s[l])), static_cast<double>(d[l]));
    int64_t counters[kLimbs] = {state.u[0][l], state.u[1][l], state.u[2][l]};
    counters_add_entropy(counters, state.top_entropy[l], u, tile_k[l]);
    for (int j = 0; j < kLimbs; ++j) state.u[j][l] = counters[j];
  }
}

template <bool kEntropy>
static void softmax_panel(const Block& b, int64_t panel, const PanelRows& rows, PanelState& state) {
  float* z = b.z + panel * kLanes;
  const F scale = load(rows.inv_temperature);
  for (int64_t v = 0; v < b.columns; v += kTile) {
    F y[kTile];
    const int64_t wide = b.columns - v < kTile ? b.columns - v : kTile;
    for (int i = 0; i < kTile; ++i) {
      if (i >= wide) {
        y[i] = from_bits(set_int(static_cast<int32_t>(kNegInfBits)));
        continue;
      }
      y[i] = logit(b, load(z + (v + i) * b.ld), v + i);
      if (b.cut) y[i] = without_cut(rows, y[i], b.first_column + v + i);
      if (b.scaled) y[i] = y[i] * scale;
      store(z + (v + i) * b.ld, y[i]);
    }
    add_tile<kEntropy>(state, y);
  }
  for (int l = 0; l < kLanes; ++l) {
    const int64_t at = rows.target[l] - b.first_column;
    if (at >= 0 && at < b.columns) state.y_target[l] = z[at * b.ld + l];
  }
}

static void softmax(const Block& b, const PanelRows* rows, PanelState* states) {
  for (int64_t p = 0; p < b.panels; ++p)
    b.entropy ? softmax_panel<true>(b, p, rows[p], states[p]) : softmax_panel<false>(b, p, rows[p], states[p]);
}

// dy = target * onehot + p * (softmax - entropy * (log p + H)), log p = (y c - lse2) ln 2; then through temperature and
// soft-cap. Exactly zero at y = -inf and in rows without a gradient; NaN in a poisoned row.
static void gradients(const Block& b, const PanelRows* all_rows) {
  for (int64_t p = 0; p < b.panels; ++p) {
    const PanelRows& rows = all_rows[p];
    const F zero = set(0.0f), one = set(1.0f), cap = set(b.softcap);
    const F scale = load(rows.inv_temperature), frac = load(rows.lse2_frac), negative_int = -load(rows.lse2_int);
    const F target = load(rows.grad_target), softmax_grad = load(rows.grad_softmax);
    const F entropy_grad = load(rows.grad_entropy), entropy = load(rows.entropy);
    const F row_scale = exp_poly(-frac), ln2 = set(static_cast<float>(kLn2));
    const I poisoned = is_nan(frac);
    const I active = ~(equal(target, zero) & equal(softmax_grad, zero) & equal(entropy_grad, zero));
    alignas(64) int32_t where[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const int64_t at = rows.target[l] - b.first_column;
      where[l] = at >= 0 && at < b.columns ? static_cast<int32_t>(at) : -1;
    }
    const I target_column = load_int(where);
    for (int64_t v = 0; v < b.columns; ++v) {
      float* z = b.z + v * b.ld + p * kLanes;
      const F before = b.bias ? load(z) + set(b.bias[v]) : load(z);
      F slope = one, y = before;
      if (b.softcap != 0.0f) {
        y = softcap(before, cap, &slope);
        slope = select(is_finite(before), slope, zero);
      }
      if (b.cut) y = without_cut(rows, y, b.first_column + v);
      if (b.scaled) y = y * scale;
      // p = P(f) 2^(k - lse2_int) 2^-lse2_frac: unlike 2^(y c - lse2) as accurate where p is small as where it is large
      const F limited = select(less(y, set(-kLogitLimit)), set(-kLogitLimit), y);
      const F shifted = fma(limited, set(kLog2e), set(kMagic)), k = shifted - set(kMagic);
      const F f = fma(limited, set(kLog2e), -k), n = k + negative_int;
      const F power =
          scale_pow2(exp_poly(f) * row_scale, magic_integer(select(less(n, set(-125.0f)), zero, n) + set(kMagic)));
      F prob = select(less(n, set(-125.0f)), zero, power);
      prob = select(poisoned, frac, prob);
      const F onehot = select(equal(target_column, set_int(static_cast<int32_t>(v))), target, zero);
      F share = softmax_grad;
      if (b.entropy)  // log p + H, the large parts first: they cancel
        share = softmax_grad - entropy_grad * fma(f - frac, ln2, fma(n, ln2, entropy));
      F dz = fma(prob, share, onehot);
      if (b.scaled) dz = dz * scale;
      if (b.softcap != 0.0f) dz = dz * slope;
      const I none = ~active | (is_neg_inf(y) & ~poisoned);
      store(z, select(none, zero, select(poisoned, frac, dz)));
    }
  }
}

}  // namespace
}  // namespace vocabshard::cpu
