// Kernels over logits that exist, for vocabshard._C. Pointers come as integers, 0 for none; strides in elements. Calls
// are positional: with few rows their cost is the host's. Compiled with bindings_backward.cpp.
#pragma once

#include "sm90/bindings_device.h"
#include "sm90/logits.h"

namespace vocabshard::sm90 {

namespace {

namespace py = pybind11;

py::tuple workspace_bytes(int device) {
  const OnDevice guard(device);
  return py::make_tuple(logits_workspace_bytes(), logits_workspace_zeroed_bytes());
}

void forward(int device, uintptr_t stream, uintptr_t workspace, uintptr_t logits, int dtype, int64_t logits_rows,
             int64_t columns, int64_t row_stride, uintptr_t source, int64_t outputs, uintptr_t target_ids,
             uintptr_t row_inv_temperature, float inv_temperature, int64_t vocab_start, int64_t valid, bool entropy,
             uintptr_t records, uintptr_t logp, uintptr_t lse, uintptr_t entropy_out, uintptr_t lse2_int,
             uintptr_t lse2_frac, uintptr_t maximum, int64_t ignore_index, int64_t real_vocab_size,
             bool invalid_is_nan) {
  const OnDevice guard(device);
  LogitsFold fold;
  fold.out = {pointer<float>(logp),       pointer<float>(lse),       pointer<float>(entropy_out),
              pointer<int32_t>(lse2_int), pointer<float>(lse2_frac), pointer<float>(maximum)};
  fold.ignore_index = ignore_index;
  fold.real_vocab_size = real_vocab_size;
  fold.invalid_is_nan = invalid_is_nan;
  logits_forward({pointer<void>(logits), dtype, logits_rows, columns, row_stride, 1}, pointer<int64_t>(source), outputs,
                 {pointer<int64_t>(target_ids), pointer<float>(row_inv_temperature), inv_temperature},
                 {vocab_start, valid, 0.0f, entropy}, pointer<int64_t>(records), fold, pointer<void>(workspace),
                 pointer<void>(stream));
}

void backward(int device, uintptr_t stream, uintptr_t logits, int dtype, int64_t logits_rows, int64_t columns,
              int64_t row_stride, uintptr_t grad_logits, int64_t grad_row_stride, uintptr_t first, uintptr_t order,
              uintptr_t target_ids, uintptr_t row_inv_temperature, float inv_temperature, int64_t vocab_start,
              int64_t valid, const RowGradients& gradients, const LogitsUpstream& upstream) {
  const OnDevice guard(device);
  logits_backward({pointer<void>(logits), dtype, logits_rows, columns, row_stride, 1}, pointer<int64_t>(first),
                  pointer<int64_t>(order),
                  {pointer<int64_t>(target_ids), pointer<float>(row_inv_temperature), inv_temperature},
                  {vocab_start, valid, 0.0f, false}, gradients, upstream,
                  {pointer<void>(grad_logits), dtype, logits_rows, columns, grad_row_stride, 1}, pointer<void>(stream));
}

}  // namespace

inline void register_logits(py::module_& module) {
  py::class_<LogitsUpstream>(module, "LogitsUpstream", "Upstream gradients of logp, lse and entropy, with strides.")
      .def(py::init([] { return LogitsUpstream{}; }))
      .def(py::init([](uintptr_t logp, int64_t logp_stride, uintptr_t lse, int64_t lse_stride, uintptr_t entropy,
                       int64_t entropy_stride, int64_t ignore_index, int64_t real_vocab_size) {
             return LogitsUpstream{pointer<float>(logp),    logp_stride,    pointer<float>(lse), lse_stride,
                                   pointer<float>(entropy), entropy_stride, ignore_index,        real_vocab_size};
           }),
           py::arg("logp"), py::arg("logp_stride"), py::arg("lse"), py::arg("lse_stride"), py::arg("entropy"),
           py::arg("entropy_stride"), py::arg("ignore_index"), py::arg("real_vocab_size"));
  module.def("cuda_logits_workspace", &workspace_bytes, py::arg("device"),
             "(bytes of workspace, leading bytes of it that are zero before the first launch)");
  module.def("cuda_logits_forward", &forward, "Records, or with records == 0 the folded rows.");
  module.def("cuda_logits_backward", &backward, "Writes all of grad_logits.");
}

}  // namespace vocabshard::sm90
