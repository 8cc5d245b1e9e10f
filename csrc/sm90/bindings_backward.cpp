// A whole backward, of vocabshard._C: pointers come as integers, 0 for none; strides in elements. Positional: with few
// rows its cost is the host's.
#include <pybind11/stl.h>

#include <vector>

#include "sm90/backward.h"
#include "sm90/bindings_device.h"
#include "sm90/bindings_dlogits.h"
#include "sm90/bindings_logits.h"
#include "sm90/bindings_products.h"
#include "sm90/launch.h"
#include "sm90/product.h"

namespace vocabshard::sm90 {

namespace {

namespace py = pybind11;

struct DeviceBackward {
  BackwardCall call;
  std::vector<int64_t> ends;
  int device;
  cudaStream_t stream;
};

// Terms, bits of broken rows, active rows, dlogits and sums for grad_bias, each from a multiple of 256 bytes on.
struct Workspace {
  int64_t broken, active, dlogits, sums, bytes;
};

Workspace lay_out(int64_t rows, int64_t width, bool bias) {
  const auto up = [](int64_t x) { return (x + 255) / 256 * 256; };
  Workspace at = {};
  at.broken = up(rows * static_cast<int64_t>(sizeof(DlogitsRow)));
  at.active = at.broken + up((rows + 63) / 64 * 8);
  at.dlogits = at.active + up(rows);
  at.sums = at.dlogits + up(2 * rows * width);
  at.bytes = at.sums + (bias ? (rows + 127) / 128 * width * 4 : 0);
  return at;
}

DeviceBackward backward_of(int device, uintptr_t stream, int32_t element, int64_t rows, int64_t depth, uintptr_t hidden,
                           int64_t hidden_row, uintptr_t weight, int64_t weight_row, uintptr_t bias,
                           int32_t bias_element, float softcap, uintptr_t row_inv_temperature, float inv_temperature,
                           bool plain, uintptr_t target_ids, int64_t ignore_index, int64_t real_vocab_size,
                           int64_t vocab_start, const std::vector<int64_t>& ends, int64_t width, uintptr_t workspace) {
  DeviceBackward backward = {};
  backward.device = device, backward.stream = as_stream(stream), backward.ends = ends;
  if (ends.empty()) throw std::invalid_argument("no block of columns");
  BackwardCall& call = backward.call;
  const Workspace at = lay_out(rows, width, true);
  DlogitsRowsCall& r = call.rows;
  r.element = element, r.rows = rows, r.depth = depth, r.hidden_row = hidden_row;
  r.vocab_start = vocab_start, r.valid = ends.back();
  r.row_inv_temperature = pointer<float>(row_inv_temperature), r.inv_temperature = inv_temperature;
  r.target_ids = pointer<int64_t>(target_ids);
  r.terms = pointer<DlogitsRow>(workspace);
  r.broken = pointer<uint64_t>(workspace + at.broken), r.active = pointer<uint8_t>(workspace + at.active);
  r.from_upstream = true;
  r.upstream.target_ids = r.target_ids, r.upstream.ignore_index = ignore_index;
  r.upstream.real_vocab_size = real_vocab_size;
  call.hidden = pointer<void>(hidden);
  call.weight = pointer<void>(weight), call.weight_row = weight_row;
  call.bias = pointer<void>(bias), call.bias_element = bias_element;
  call.softcap = softcap, call.plain = plain;
  call.dlogits = pointer<void>(workspace + at.dlogits), call.width = width;
  call.bias_sums = pointer<float>(workspace + at.sums);  // there where grad_bias is wanted
  return backward;
}

}  // namespace

void register_backward(py::module_& module) {
  register_dlogits(module);
  register_logits(module);
  register_products(module);
  module.def(
      "sm90_backward_workspace",
      [](int64_t rows, int64_t width, bool bias) { return lay_out(rows, width, bias).bytes; }, py::arg("rows"),
      py::arg("width"), py::arg("bias"), "Bytes that Sm90Backward works in.");
  py::class_<DeviceBackward>(module, "Sm90Backward", "A backward that makes its logits again, to be launched.")
      .def(py::init(&backward_of), py::arg("device"), py::arg("stream"), py::arg("element"), py::arg("rows"),
           py::arg("depth"), py::arg("hidden"), py::arg("hidden_row"), py::arg("weight"), py::arg("weight_row"),
           py::arg("bias"), py::arg("bias_element"), py::arg("softcap"), py::arg("row_inv_temperature"),
           py::arg("inv_temperature"), py::arg("plain"), py::arg("target_ids"), py::arg("ignore_index"),
           py::arg("real_vocab_size"), py::arg("vocab_start"), py::arg("ends"), py::arg("width"), py::arg("workspace"))
      .def(
          "launch",
          [](DeviceBackward& backward, uintptr_t lse2_int, uintptr_t lse2_frac, uintptr_t entropy, uintptr_t logp_grad,
             int64_t logp_stride, uintptr_t lse_grad, int64_t lse_stride, uintptr_t entropy_grad,
             int64_t entropy_stride, uintptr_t grad_hidden, bool hidden_rounded, int64_t chain, uintptr_t grad_weight,
             int64_t grad_weight_row, bool weight_added, uintptr_t grad_bias) {
            BackwardCall& call = backward.call;
            DlogitsRowsCall& r = call.rows;
            r.lse2_int = pointer<int32_t>(lse2_int), r.lse2_frac = pointer<float>(lse2_frac);
            r.entropy = pointer<float>(entropy);
            r.upstream.logp = pointer<float>(logp_grad), r.upstream.logp_stride = logp_stride;
            r.upstream.lse = pointer<float>(lse_grad), r.upstream.lse_stride = lse_stride;
            r.upstream.entropy = pointer<float>(entropy_grad), r.upstream.entropy_stride = entropy_stride;
            r.hidden = grad_weight == 0 ? nullptr : call.hidden;
            call.grad_hidden = pointer<void>(grad_hidden), call.chain = chain;
            call.hidden_output = hidden_rounded ? kProductElement : kProductFloat;
            call.grad_weight = pointer<void>(grad_weight), call.grad_weight_row = grad_weight_row;
            call.weight_output = weight_added ? kProductAdd : kProductElement;
            call.grad_bias = pointer<void>(grad_bias);
            if (grad_bias == 0) call.bias_sums = nullptr;
            const OnDevice guard(backward.device);
            launch_backward_to_hidden(call, backward.ends.data(), static_cast<int64_t>(backward.ends.size()),
                                      backward.stream);
          },
          py::arg("lse2_int"), py::arg("lse2_frac"), py::arg("entropy"), py::arg("logp_grad"), py::arg("logp_stride"),
          py::arg("lse_grad"), py::arg("lse_stride"), py::arg("entropy_grad"), py::arg("entropy_stride"),
          py::arg("grad_hidden"), py::arg("hidden_rounded"), py::arg("chain"), py::arg("grad_weight"),
          py::arg("grad_weight_row"), py::arg("weight_added"), py::arg("grad_bias"),
          "All but the last block's part of grad_weight and grad_bias.")
      .def(
          "finish",
          [](const DeviceBackward& backward) {
            const OnDevice guard(backward.device);
            launch_backward_rest(backward.call, backward.ends.data(), static_cast<int64_t>(backward.ends.size()),
                                 backward.stream);
          },
          "What launch left out.");
}

}  // namespace vocabshard::sm90
