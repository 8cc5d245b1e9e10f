// The kernels of one instruction set. A file that includes this defines VS_VARIANT (the function that returns its
// table) and VS_VARIANT_NAME.

#pragma once

#include "cpu/gemm.h"
#include "cpu/hash.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"

namespace vocabshard::cpu {
namespace {

// a * a = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; fused, the difference would survive.
__attribute__((noinline)) F product_plus(F a, F c) { return a * a + c; }
__attribute__((noinline)) float product_plus(float a, float c) { return add(mul(a, a), c); }
bool contracts() {
  volatile float a = 1.0f + 0x1p-12f, c = -(1.0f + 0x1p-11f);
  alignas(64) float r[kLanes];
  store(r, product_plus(set(a), set(c)));
  return r[0] != 0.0f || product_plus(a, c) != 0.0f;
}

constexpr Kernels kTable = {VS_VARIANT_NAME, pack_panel, unpack_panel,  pack_columns, load_rows, store_row,
                            multiply,        softmax,    finish_logits, gradients,    row_hash,  contracts};

}  // namespace

const Kernels& VS_VARIANT() { return kTable; }

}  // namespace vocabshard::cpu
