// The fused forward and the fold of vocabshard._C: pointers come as integers, 0 for none; strides in elements. The
// caller names device and stream; the thread's current device is afterwards what it was.
#include "sm90/bindings_sm90.h"

#include "sm90/bindings_device.h"
#include "sm90/launch.h"

namespace vocabshard::sm90 {

namespace {

namespace py = pybind11;

struct DeviceForward {
  ForwardCall call;
  int device;
};

DeviceForward forward_call(int device, int32_t element, int64_t rows, int64_t depth, int64_t columns, uintptr_t hidden,
                           int64_t hidden_row, int64_t hidden_column, uintptr_t weight, int64_t weight_row,
                           int64_t weight_column, bool entropy, int32_t path) {
  ForwardCall call = {};
  call.element = element;
  call.rows = rows, call.depth = depth, call.columns = columns;
  call.hidden = pointer<void>(hidden), call.hidden_row = hidden_row, call.hidden_column = hidden_column;
  call.weight = pointer<void>(weight), call.weight_row = weight_row, call.weight_column = weight_column;
  call.entropy = entropy;
  call.path = path;
  return {call, device};
}

}  // namespace

void register_sm90(py::module_& module) {
  register_dlogits(module);
  register_products(module);
  py::class_<DeviceForward>(module, "Sm90Forward", "A forward of `hidden` and `weight`, to be planned and launched.")
      .def(py::init(&forward_call), py::kw_only(), py::arg("device"), py::arg("element"), py::arg("rows"),
           py::arg("depth"), py::arg("columns"), py::arg("hidden"), py::arg("hidden_row"), py::arg("hidden_column"),
           py::arg("weight"), py::arg("weight_row"), py::arg("weight_column"), py::arg("entropy"), py::arg("path") = 0)
      .def(
          "plan",
          [](const DeviceForward& forward) {
            const OnDevice guard(forward.device);
            const ForwardPlan plan = plan_forward(forward.call, multiprocessor_count());
            return py::make_tuple(plan.path, plan.workspace, plan.chunk_rows, plan.splits);
          },
          "(path, bytes of workspace, rows a launch, vocabulary splits)")
      .def(
          "launch",
          [](DeviceForward& forward, uintptr_t target_ids, int64_t vocab_start, int64_t valid, uintptr_t bias,
             int32_t bias_element, uintptr_t row_inv_temperature, float inv_temperature, float softcap,
             uintptr_t logits, int64_t logits_row, uintptr_t records, uintptr_t workspace, uintptr_t stream) {
            ForwardCall& call = forward.call;
            call.target_ids = pointer<int64_t>(target_ids);
            call.vocab_start = vocab_start, call.valid = valid;
            call.bias = pointer<void>(bias), call.bias_element = bias_element;
            call.row_inv_temperature = pointer<float>(row_inv_temperature), call.inv_temperature = inv_temperature;
            call.softcap = softcap;
            call.logits = pointer<float>(logits), call.logits_row = logits_row;
            call.records = pointer<int64_t>(records), call.workspace = pointer<void>(workspace);
            const OnDevice guard(forward.device);
            launch_forward(call, as_stream(stream));
          },
          py::kw_only(), py::arg("target_ids"), py::arg("vocab_start"), py::arg("valid"), py::arg("bias") = 0,
          py::arg("bias_element") = 0, py::arg("row_inv_temperature") = 0, py::arg("inv_temperature") = 1.0f,
          py::arg("softcap") = 0.0f, py::arg("logits") = 0, py::arg("logits_row") = 0, py::arg("records"),
          py::arg("workspace"), py::arg("stream"));

  module.attr("SM90_PATHS") =
      py::dict(py::arg("auto") = int(kAuto), py::arg("rows128") = int(kRows128), py::arg("rows64") = int(kRows64),
               py::arg("mma") = int(kMma), py::arg("fma") = int(kFma));
  module.def(
      "sm90_fold",
      [](int device, uintptr_t records, int64_t ranks, int64_t rows, uintptr_t target_ids, py::object ignore_index,
         int64_t real_vocab_size, bool invalid_is_nan, bool entropy, uintptr_t logp, uintptr_t lse,
         uintptr_t entropy_out, uintptr_t lse2_int, uintptr_t lse2_frac, uintptr_t maximum, uintptr_t stream) {
        FoldCall call = {};
        call.records = pointer<int64_t>(records), call.ranks = ranks, call.rows = rows;
        call.target_ids = pointer<int64_t>(target_ids);
        call.has_ignore_index = !ignore_index.is_none();
        if (call.has_ignore_index) call.ignore_index = ignore_index.cast<int64_t>();
        call.real_vocab_size = real_vocab_size, call.invalid_is_nan = invalid_is_nan, call.entropy = entropy;
        call.logp = pointer<float>(logp), call.lse = pointer<float>(lse);
        call.entropy_out = pointer<float>(entropy_out), call.lse2_int = pointer<int32_t>(lse2_int);
        call.lse2_frac = pointer<float>(lse2_frac), call.maximum = pointer<float>(maximum);
        const OnDevice guard(device);
        launch_fold(call, as_stream(stream));
      },
      py::kw_only(), py::arg("device"), py::arg("records"), py::arg("ranks"), py::arg("rows"), py::arg("target_ids"),
      py::arg("ignore_index"), py::arg("real_vocab_size"), py::arg("invalid_is_nan"), py::arg("entropy"),
      py::arg("logp"), py::arg("lse"), py::arg("entropy_out") = 0, py::arg("lse2_int"), py::arg("lse2_frac"),
      py::arg("maximum"), py::arg("stream"), "Folds [ranks, words, rows] records in ascending order of ranks.");
}

}  // namespace vocabshard::sm90
