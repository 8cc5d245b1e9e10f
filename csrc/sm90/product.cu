// Checks a product of the gradients and launches it.
#include "sm90/check.h"
#include "sm90/launch.h"
#include "sm90/product_wgmma.h"

namespace vocabshard::sm90 {

namespace {

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

bool on_16_bytes(const void* base, int64_t row_stride, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && row_stride > 0 && row_stride * element_bytes % 16 == 0;
}

}  // namespace

void launch_product(const ProductCall& call, cudaStream_t stream) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1024;
  require(call.rows < kMost && call.depth < kMost && call.columns < kMost,
          "N, D and V_local must be below 2^31 - 1024");
  require(call.element == kBfloat16 || call.element == kHalf, "the products take bf16 or fp16");
  require(call.depth > 0, "a sum of nothing is the caller's");
  require(call.output == kProductFloat || call.output == kProductElement || call.output == kProductAdd,
          "no such output");
  require(call.columns % 8 == 0, "D must be a multiple of 8");
  require(tma_can_read(call.a, call.a_row, 1) && tma_can_read(call.b, call.b_row, 1),
          "the operands must have bases on 16 bytes and row strides of multiples of 8 elements");
  require(on_16_bytes(call.out, call.out_row, call.output == kProductElement ? 2 : 4) &&
              (call.init == nullptr || on_16_bytes(call.init, call.init_row, 4)),
          "the sums must have bases and row strides on 16 bytes");
  require(call.transposed || call.init == nullptr || (call.output == kProductFloat && call.init == call.out),
          "grad_hidden goes on from itself in fp32, or a chain of its own is added to it or stored");
  const DlogitsKeptCall& turn = call.turn;
  require(turn.codes == nullptr ||
              (call.transposed && call.init == nullptr && call.element == kBfloat16 && turn.out == turn.codes &&
               turn.out_row == turn.codes_row && turn.bias_sums == nullptr && turn.rows > 0 && turn.rows < kMost &&
               (turn.columns / 64 + 1) * turn.references_group < (int64_t{1} << 32)),
          "kept logits are turned beside grad_weight of bf16, where they lie");
  if (call.rows == 0 || call.columns == 0) return;
  const int32_t multiprocessors = multiprocessor_count();
  call.element == kHalf ? launch_product_fp16(call, multiprocessors, stream)
                        : launch_product_bf16(call, multiprocessors, stream);
  check_launch("product");
}

}  // namespace vocabshard::sm90
