// The gradient of the logits, of vocabshard._C: pointers come as integers, 0 for none; strides in elements.
// Compiled with bindings_backward.cpp.
#pragma once

#include "sm90/bindings_device.h"
#include "sm90/dlogits.h"

namespace vocabshard::sm90 {

namespace py = pybind11;

inline void register_dlogits(py::module_& module) {
  module.attr("SM90_DLOGITS_ROW_BYTES") = sizeof(DlogitsRow);
  module.def(
      "sm90_row_grads",
      [](int device, int64_t rows, uintptr_t logp, int64_t logp_stride, uintptr_t lse, int64_t lse_stride,
         uintptr_t entropy, int64_t entropy_stride, uintptr_t target_ids, int64_t ignore_index, int64_t real_vocab_size,
         uintptr_t grad_target, uintptr_t grad_softmax, uintptr_t grad_entropy, uintptr_t stream) {
        RowGradsCall call = {};
        call.rows = rows;
        call.logp = pointer<float>(logp), call.logp_stride = logp_stride;
        call.lse = pointer<float>(lse), call.lse_stride = lse_stride;
        call.entropy = pointer<float>(entropy), call.entropy_stride = entropy_stride;
        call.target_ids = pointer<int64_t>(target_ids);
        call.ignore_index = ignore_index, call.real_vocab_size = real_vocab_size;
        call.grad_target = pointer<float>(grad_target), call.grad_softmax = pointer<float>(grad_softmax);
        call.grad_entropy = pointer<float>(grad_entropy);
        const OnDevice guard(device);
        launch_row_grads(call, as_stream(stream));
      },
      py::kw_only(), py::arg("device"), py::arg("rows"), py::arg("logp") = 0, py::arg("logp_stride") = 0,
      py::arg("lse") = 0, py::arg("lse_stride") = 0, py::arg("entropy") = 0, py::arg("entropy_stride") = 0,
      py::arg("target_ids"), py::arg("ignore_index"), py::arg("real_vocab_size"), py::arg("grad_target"),
      py::arg("grad_softmax"), py::arg("grad_entropy") = 0, py::arg("stream"),
      "Upstream gradients of logp, lse and entropy as coefficients of the target and the softmax.");
  module.def(
      "sm90_dlogits_rows",
      [](int device, int64_t rows, uintptr_t lse2_int, uintptr_t lse2_frac, uintptr_t entropy, uintptr_t grad_target,
         uintptr_t grad_softmax, uintptr_t grad_entropy, uintptr_t target_ids, int64_t vocab_start, int64_t valid,
         uintptr_t row_inv_temperature, float inv_temperature, uintptr_t terms, uintptr_t active, uintptr_t broken,
         int32_t element, int64_t depth, uintptr_t hidden, int64_t hidden_row, uintptr_t stream) {
        DlogitsRowsCall call = {};
        call.rows = rows;
        call.lse2_int = pointer<int32_t>(lse2_int), call.lse2_frac = pointer<float>(lse2_frac);
        call.entropy = pointer<float>(entropy);
        call.grad_target = pointer<float>(grad_target), call.grad_softmax = pointer<float>(grad_softmax);
        call.grad_entropy = pointer<float>(grad_entropy);
        call.target_ids = pointer<int64_t>(target_ids);
        call.vocab_start = vocab_start, call.valid = valid;
        call.row_inv_temperature = pointer<float>(row_inv_temperature), call.inv_temperature = inv_temperature;
        call.terms = pointer<DlogitsRow>(terms), call.active = pointer<uint8_t>(active);
        call.broken = pointer<uint64_t>(broken);
        call.element = element, call.depth = depth;
        call.hidden = pointer<void>(hidden), call.hidden_row = hidden_row;
        const OnDevice guard(device);
        launch_dlogits_rows(call, as_stream(stream));
      },
      py::kw_only(), py::arg("device"), py::arg("rows"), py::arg("lse2_int"), py::arg("lse2_frac"),
      py::arg("entropy") = 0, py::arg("grad_target"), py::arg("grad_softmax"), py::arg("grad_entropy") = 0,
      py::arg("target_ids"), py::arg("vocab_start"), py::arg("valid"), py::arg("row_inv_temperature") = 0,
      py::arg("inv_temperature") = 1.0f, py::arg("terms"), py::arg("active"), py::arg("broken") = 0, py::arg("element"),
      py::arg("depth"), py::arg("hidden") = 0, py::arg("hidden_row") = 0, py::arg("stream"),
      "The rows' terms, SM90_DLOGITS_ROW_BYTES each; which rows count, and which of the others hold infinities or "
      "NaN.");
  module.def(
      "sm90_dlogits",
      [](int device, int32_t element, int64_t rows, int64_t depth, int64_t columns, uintptr_t hidden,
         int64_t hidden_row, uintptr_t weight, int64_t weight_row, uintptr_t bias, int32_t bias_element, float softcap,
         bool plain, int64_t first_column, uintptr_t row_terms, uintptr_t out, int64_t out_row, uintptr_t bias_sums,
         uintptr_t cut, int64_t first_id, uintptr_t stream) {
        DlogitsCall call = {};
        call.element = element;
        call.rows = rows, call.depth = depth, call.columns = columns;
        call.hidden = pointer<void>(hidden), call.hidden_row = hidden_row;
        call.weight = pointer<void>(weight), call.weight_row = weight_row;
        call.bias = pointer<void>(bias), call.bias_element = bias_element;
        call.softcap = softcap, call.plain = plain;
        call.first_column = first_column;
        call.row_terms = pointer<DlogitsRow>(row_terms);
        call.out = pointer<void>(out), call.out_row = out_row;
        call.bias_sums = pointer<float>(bias_sums);
        call.cut = pointer<int64_t>(cut), call.first_id = first_id;
        const OnDevice guard(device);
        launch_dlogits(call, as_stream(stream));
      },
      py::kw_only(), py::arg("device"), py::arg("element"), py::arg("rows"), py::arg("depth"), py::arg("columns"),
      py::arg("hidden"), py::arg("hidden_row"), py::arg("weight"), py::arg("weight_row"), py::arg("bias") = 0,
      py::arg("bias_element") = 0, py::arg("softcap") = 0.0f, py::arg("plain"), py::arg("first_column"),
      py::arg("row_terms"), py::arg("out"), py::arg("out_row"), py::arg("bias_sums") = 0, py::arg("cut") = 0,
      py::arg("first_id") = 0, py::arg("stream"),
      "dlogits of a block of columns, rounded to the element, [rows, out_row]; 0 where `cut` leaves out.");
  py::class_<DeviceDlogitsKept>(
      module, "Sm90DlogitsKept",
      "dlogits of a block of columns from what the forward kept of them, bf16 [rows, out_row].")
      .def(py::init([](int device, int64_t rows, int64_t columns, uintptr_t codes, int64_t codes_row,
                       uintptr_t references, int64_t references_group, uintptr_t target_y, bool plain,
                       int64_t first_column, uintptr_t row_terms, uintptr_t out, int64_t out_row, uintptr_t bias_sums,
                       int64_t sums_row) {
             DlogitsKeptCall call = {};
             call.rows = rows, call.columns = columns;
             call.codes = pointer<uint16_t>(codes), call.codes_row = codes_row;
             call.references = pointer<float>(references), call.references_group = references_group;
             call.target_y = pointer<float>(target_y);
             call.plain = plain;
             call.first_column = first_column;
             call.row_terms = pointer<DlogitsRow>(row_terms);
             call.out = pointer<void>(out), call.out_row = out_row;
             call.bias_sums = pointer<float>(bias_sums), call.sums_row = sums_row;
             return DeviceDlogitsKept{call, device};
           }),
           py::kw_only(), py::arg("device"), py::arg("rows"), py::arg("columns"), py::arg("codes"),
           py::arg("codes_row"), py::arg("references"), py::arg("references_group"), py::arg("target_y"),
           py::arg("plain"), py::arg("first_column"), py::arg("row_terms"), py::arg("out"), py::arg("out_row"),
           py::arg("bias_sums") = 0, py::arg("sums_row") = 0)
      .def(
          "launch",
          [](const DeviceDlogitsKept& kept, uintptr_t stream) {
            const OnDevice guard(kept.device);
            launch_dlogits_kept(kept.call, as_stream(stream));
          },
          py::arg("stream"), "A pass of its own.");
  module.def(
      "sm90_bias_sums",
      [](int device, uintptr_t sums, int64_t blocks, int64_t stride, int64_t columns, uintptr_t grad_bias,
         int32_t bias_element, uintptr_t stream) {
        const OnDevice guard(device);
        launch_bias_sums(pointer<float>(sums), blocks, stride, columns, pointer<void>(grad_bias), bias_element,
                         as_stream(stream));
      },
      py::kw_only(), py::arg("device"), py::arg("sums"), py::arg("blocks"), py::arg("stride"), py::arg("columns"),
      py::arg("grad_bias"), py::arg("bias_element"), py::arg("stream"), "Adds up the sums of blocks of 128 rows.");
}

}  // namespace vocabshard::sm90
