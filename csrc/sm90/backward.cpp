#include "sm90/backward.h"

#include <algorithm>
#include <stdexcept>

#include "sm90/launch.h"
#include "sm90/product.h"

namespace vocabshard::sm90 {

namespace {

template <class T>
T* elements(T* base, int64_t count, int bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return base == nullptr ? nullptr : static_cast<Byte*>(base) + count * bytes;
}

int bytes_of(int32_t element) { return element == kFloat ? 4 : 2; }

void launch_block_dlogits(const BackwardCall& call, int64_t start, int64_t stop, cudaStream_t stream) {
  DlogitsCall block = {};
  block.element = call.rows.element;
  block.rows = call.rows.rows, block.depth = call.rows.depth, block.columns = stop - start;
  block.hidden = call.hidden, block.hidden_row = call.rows.hidden_row;
  block.weight = elements(call.weight, start * call.weight_row, 2), block.weight_row = call.weight_row;
  block.bias = elements(call.bias, start, bytes_of(call.bias_element)), block.bias_element = call.bias_element;
  block.softcap = call.softcap, block.plain = call.plain;
  block.first_column = start;
  block.row_terms = call.rows.terms, block.behind_terms = start == 0;
  block.out = call.dlogits, block.out_row = call.width;
  block.bias_sums = call.bias_sums;
  launch_dlogits(block, stream);
}

void launch_block_hidden(const BackwardCall& call, int64_t start, int64_t stop, cudaStream_t stream) {
  if (call.grad_hidden == nullptr) return;
  ProductCall product = {};
  product.element = call.rows.element, product.rows = call.rows.rows, product.columns = call.rows.depth;
  product.a_row = call.width, product.b_row = call.weight_row;
  product.out = call.grad_hidden, product.out_row = call.rows.depth, product.output = call.hidden_output;
  product.row_active = call.rows.active;
  const int64_t step = call.chain > 0 ? call.chain : stop - start;
  for (int64_t column = start; column < stop; column += step) {
    product.depth = std::min(step, stop - column);
    product.a = elements(call.dlogits, column - start, 2);
    product.b = elements(call.weight, column * call.weight_row, 2);
    if (column > 0 && call.chain > 0) product.output = kProductAdd;
    if (column > 0 && call.chain == 0)
      product.init = static_cast<const float*>(call.grad_hidden), product.init_row = call.rows.depth;
    launch_product(product, stream);
  }
}

void launch_block_weight(const BackwardCall& call, int64_t start, int64_t stop, cudaStream_t stream) {
  if (call.grad_weight == nullptr) return;
  ProductCall product = {};
  product.element = call.rows.element, product.transposed = true;
  product.rows = stop - start, product.depth = call.rows.rows, product.columns = call.rows.depth;
  product.a = call.dlogits, product.a_row = call.width;
  product.b = call.hidden, product.b_row = call.rows.hidden_row;
  product.row_mask = call.rows.broken;
  product.out = elements(call.grad_weight, start * call.grad_weight_row, call.weight_output == kProductElement ? 2 : 4);
  product.out_row = call.grad_weight_row, product.output = call.weight_output;
  launch_product(product, stream);
}

void launch_block_bias(const BackwardCall& call, int64_t start, int64_t stop, cudaStream_t stream) {
  if (call.grad_bias == nullptr) return;
  launch_bias_sums(call.bias_sums, (call.rows.rows + 127) / 128, call.width, stop - start,
                   elements(call.grad_bias, start, bytes_of(call.bias_element)), call.bias_element, stream);
}

int64_t start_of(const int64_t* ends, int64_t block) { return block == 0 ? 0 : ends[block - 1]; }

}  // namespace

void launch_backward_to_hidden(const BackwardCall& call, const int64_t* ends, int64_t blocks, cudaStream_t stream) {
  if (call.hidden_output == kProductElement && (blocks > 1 || (call.chain > 0 && call.chain < ends[0])))
    throw std::invalid_argument("grad_hidden is rounded where all of it comes at once");
  launch_dlogits_rows(call.rows, stream);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t start = start_of(ends, block), stop = ends[block];
    launch_block_dlogits(call, start, stop, stream);
    launch_block_hidden(call, start, stop, stream);
    if (block + 1 == blocks) return;
    launch_block_weight(call, start, stop, stream);
    launch_block_bias(call, start, stop, stream);
  }
}

void launch_backward_rest(const BackwardCall& call, const int64_t* ends, int64_t blocks, cudaStream_t stream) {
  launch_block_weight(call, start_of(ends, blocks - 1), ends[blocks - 1], stream);
  launch_block_bias(call, start_of(ends, blocks - 1), ends[blocks - 1], stream);
}

}  // namespace vocabshard::sm90
