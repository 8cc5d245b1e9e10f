// The gradients' products, of vocabshard._C: pointers come as integers, 0 for none; strides in elements.
// Compiled with bindings_backward.cpp.
#pragma once

#include "sm90/bindings_device.h"
#include "sm90/launch.h"
#include "sm90/product.h"
#include "sm90/product_fma.h"

namespace vocabshard::sm90 {

namespace py = pybind11;

inline void register_products(py::module_& module) {
  module.def(
      "sm90_grad_hidden",
      [](int device, int32_t element, int64_t rows, int64_t depth, int64_t columns, uintptr_t dlogits,
         int64_t dlogits_row, uintptr_t weight, int64_t weight_row, uintptr_t row_active, uintptr_t grad,
         int64_t grad_row, int32_t grad_element, bool go_on, bool add, uintptr_t stream) {
        if (grad_element != kFloat && (go_on || add || grad_element != element))
          throw std::invalid_argument(
              "grad must be fp32, or of the operands' type and neither gone on from nor added to");
        ProductCall call = {};
        call.element = element, call.rows = rows, call.depth = columns, call.columns = depth;
        call.a = pointer<void>(dlogits), call.a_row = dlogits_row, call.b = pointer<void>(weight);
        call.b_row = weight_row, call.out = pointer<void>(grad), call.out_row = grad_row;
        call.output = grad_element != kFloat ? kProductElement : add ? kProductAdd : kProductFloat;
        if (go_on) call.init = pointer<float>(grad), call.init_row = grad_row;
        call.row_active = pointer<uint8_t>(row_active);
        const OnDevice guard(device);
        launch_product(call, as_stream(stream));
      },
      py::kw_only(), py::arg("device"), py::arg("element"), py::arg("rows"), py::arg("depth"), py::arg("columns"),
      py::arg("dlogits"), py::arg("dlogits_row"), py::arg("weight"), py::arg("weight_row"), py::arg("row_active") = 0,
      py::arg("grad"), py::arg("grad_row"), py::arg("grad_element"), py::arg("go_on"), py::arg("add") = false,
      py::arg("stream"),
      "grad [N, D] = (grad if go_on else 0) + dlogits [N, Vb] @ weight [Vb, D]; add: += a chain of its own.");
  module.def(
      "sm90_grad_weight",
      [](int device, int32_t element, int64_t rows, int64_t depth, int64_t columns, uintptr_t dlogits,
         int64_t dlogits_row, uintptr_t hidden, int64_t hidden_row, uintptr_t row_mask, uintptr_t init,
         int64_t init_row, uintptr_t grad, int64_t grad_row, int32_t grad_element, bool add, uintptr_t stream,
         const DeviceDlogitsKept* turn) {
        if (grad_element != kFloat && (add || grad_element != element))
          throw std::invalid_argument("grad must be fp32, or of the operands' type and not added to");
        ProductCall call = {};
        call.element = element, call.transposed = true;
        call.rows = columns, call.depth = rows, call.columns = depth;
        call.a = pointer<void>(dlogits), call.a_row = dlogits_row, call.b = pointer<void>(hidden);
        call.b_row = hidden_row, call.row_mask = pointer<uint64_t>(row_mask);
        call.init = pointer<float>(init), call.init_row = init_row;
        call.out = pointer<void>(grad), call.out_row = grad_row;
        call.output = grad_element != kFloat ? kProductElement : add ? kProductAdd : kProductFloat;
        if (turn != nullptr) call.turn = turn->call;
        const OnDevice guard(device);
        launch_product(call, as_stream(stream));
      },
      py::kw_only(), py::arg("device"), py::arg("element"), py::arg("rows"), py::arg("depth"), py::arg("columns"),
      py::arg("dlogits"), py::arg("dlogits_row"), py::arg("hidden"), py::arg("hidden_row"), py::arg("row_mask") = 0,
      py::arg("init") = 0, py::arg("init_row") = 0, py::arg("grad"), py::arg("grad_row"), py::arg("grad_element"),
      py::arg("add") = false, py::arg("stream"), py::arg("turn") = nullptr,
      "grad [Vb, D] = or += (init or 0) + dlogits [N, Vb]^T @ hidden [N, D].");
  module.def(
      "sm90_add_fma_product",
      [](int device, int64_t rows, int64_t depth, int64_t columns, uintptr_t a, int64_t a_row, int64_t a_column,
         uintptr_t b, int64_t b_row, uintptr_t out, int64_t out_row, uintptr_t stream) {
        const FmaProductCall call = {
            rows,   depth, columns, pointer<float>(a), a_row, a_column, pointer<float>(b), b_row, pointer<float>(out),
            out_row};
        const OnDevice guard(device);
        launch_fma_product(call, as_stream(stream));
      },
      py::kw_only(), py::arg("device"), py::arg("rows"), py::arg("depth"), py::arg("columns"), py::arg("a"),
      py::arg("a_row"), py::arg("a_column"), py::arg("b"), py::arg("b_row"), py::arg("out"), py::arg("out_row"),
      py::arg("stream"),
      "out [rows, columns] fp32 goes on by a [rows, depth] @ b [depth, columns], one FMA at a time.");
}

}  // namespace vocabshard::sm90
