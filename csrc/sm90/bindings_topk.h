// The best columns and the target's rank, for vocabshard._C. Pointers come as integers, 0 for none; strides in
// elements. Calls are positional: with few rows their cost is the host's. Compiled with bindings_sm90.cpp.
#pragma once

#include <string>

#include "sm90/bindings_device.h"
#include "sm90/topk.h"

namespace vocabshard::sm90 {

namespace {

namespace py = pybind11;

void scan(int device, uintptr_t stream, uintptr_t logits, int64_t row_stride, int64_t rows, int64_t valid,
          int64_t vocab_start, int32_t n, uintptr_t target_ids, uintptr_t place, uintptr_t best, uintptr_t before) {
  const OnDevice guard(device);
  TopkScan call = {};
  call.logits = pointer<float>(logits), call.row_stride = row_stride, call.rows = rows, call.valid = valid;
  call.vocab_start = vocab_start, call.n = n, call.target_ids = pointer<int64_t>(target_ids);
  call.place = pointer<int64_t>(place), call.best = pointer<int64_t>(best), call.before = pointer<int64_t>(before);
  launch_topk_scan(call, as_stream(stream));
}

TopkFinish finish_call(uintptr_t records, int64_t parts, int64_t rows, bool entropy, int32_t n, uintptr_t target_ids,
                       uintptr_t scales, float scale, uintptr_t cut, uintptr_t ids, uintptr_t logp, uintptr_t rank,
                       const FoldRows& fold) {
  TopkFinish call = {};
  call.records = pointer<int64_t>(records), call.parts = parts, call.rows = rows, call.entropy = entropy;
  call.n = n, call.target_ids = pointer<int64_t>(target_ids);
  call.scales = pointer<float>(scales), call.scale = scale, call.cut = pointer<int64_t>(cut);
  call.ids = pointer<int64_t>(ids), call.logp = pointer<float>(logp), call.rank = pointer<int64_t>(rank);
  call.fold = fold;
  return call;
}

void finish(uintptr_t best, int64_t ranks, uintptr_t before, int device, uintptr_t stream, uintptr_t records,
            int64_t parts, int64_t rows, bool entropy, int32_t n, uintptr_t target_ids, uintptr_t scales, float scale,
            uintptr_t cut, uintptr_t ids, uintptr_t logp, uintptr_t rank, const FoldRows& fold) {
  const OnDevice guard(device);
  TopkFinish call =
      finish_call(records, parts, rows, entropy, n, target_ids, scales, scale, cut, ids, logp, rank, fold);
  call.best = pointer<int64_t>(best), call.ranks = ranks, call.before = pointer<int64_t>(before);
  launch_topk_finish(call, as_stream(stream));
}

void scan_and_finish(uintptr_t logits, int64_t row_stride, int64_t valid, int64_t vocab_start, int device,
                     uintptr_t stream, uintptr_t records, int64_t parts, int64_t rows, bool entropy, int32_t n,
                     uintptr_t target_ids, uintptr_t scales, float scale, uintptr_t cut, uintptr_t ids, uintptr_t logp,
                     uintptr_t rank, const FoldRows& fold) {
  const OnDevice guard(device);
  TopkScan call = {};
  call.logits = pointer<float>(logits), call.row_stride = row_stride, call.rows = rows, call.valid = valid;
  call.vocab_start = vocab_start, call.n = n, call.target_ids = pointer<int64_t>(target_ids);
  call.finishes = true;
  call.finish = finish_call(records, parts, rows, entropy, n, target_ids, scales, scale, cut, ids, logp, rank, fold);
  launch_topk_scan(call, as_stream(stream));
}

void target(int device, uintptr_t stream, int32_t element, int64_t rows, int64_t depth, uintptr_t hidden,
            int64_t hidden_row, uintptr_t weight, int64_t weight_row, uintptr_t bias, int32_t bias_element,
            float softcap, int64_t vocab_start, int64_t valid, uintptr_t target_ids, uintptr_t place) {
  const OnDevice guard(device);
  launch_topk_target(
      {element, rows, depth, pointer<void>(hidden), hidden_row, pointer<void>(weight), weight_row, pointer<void>(bias),
       bias_element, softcap, vocab_start, valid, pointer<int64_t>(target_ids), pointer<int64_t>(place)},
      as_stream(stream));
}

// With no workspace nothing runs. Returns the bytes that it takes, 0 where there is no kernel for such a call.
int64_t forward(int device, uintptr_t stream, int32_t element, int64_t rows, int64_t depth, int64_t columns,
                uintptr_t hidden, int64_t hidden_row, uintptr_t weight, int64_t weight_row, uintptr_t bias,
                int32_t bias_element, uintptr_t target_ids, int64_t vocab_start, uintptr_t row_inv_temperature,
                float inv_temperature, float softcap, uintptr_t cut, uintptr_t records, int32_t n, uintptr_t place,
                uintptr_t best, uintptr_t before, uintptr_t workspace) {
  ForwardCall call = {};
  call.element = element;
  call.rows = rows, call.depth = depth, call.columns = columns;
  call.hidden = pointer<void>(hidden), call.hidden_row = hidden_row, call.hidden_column = 1;
  call.weight = pointer<void>(weight), call.weight_row = weight_row, call.weight_column = 1;
  call.bias = pointer<void>(bias), call.bias_element = bias_element;
  call.vocab_start = vocab_start, call.valid = columns, call.target_ids = pointer<int64_t>(target_ids);
  call.row_inv_temperature = pointer<float>(row_inv_temperature), call.inv_temperature = inv_temperature;
  call.softcap = softcap, call.cut = pointer<int64_t>(cut);
  call.records = pointer<int64_t>(records);
  call.top = {n, pointer<int64_t>(place), pointer<int64_t>(best), pointer<int64_t>(before)};
  call.workspace = pointer<void>(workspace);
  if (n < 1 || n > kMostTop) throw std::invalid_argument("topk: 1 to " + std::to_string(kMostTop) + " best columns");
  const OnDevice guard(device);
  const ForwardPlan plan = plan_forward(call, multiprocessor_count());
  if (plan.path != kRows128 || rows > plan.chunk_rows || columns == 0) return 0;
  if (workspace != 0) launch_forward(call, as_stream(stream));
  return plan.workspace;
}

}  // namespace

inline void register_topk(py::module_& module) {
  module.attr("TOPK_MOST") = kMostTop;
  module.def("sm90_topk_fits", &topk_scan_fits, py::arg("valid"), py::arg("n"));
  module.def("sm90_topk_scan", &scan, py::arg("device"), py::arg("stream"), py::arg("logits"), py::arg("row_stride"),
             py::arg("rows"), py::arg("valid"), py::arg("vocab_start"), py::arg("n"), py::arg("target_ids"),
             py::arg("place"), py::arg("best"), py::arg("before"),
             "The n best places of rows of logits, and how many are larger than the target's.");
  module.def("sm90_topk_finish", &finish, py::arg("best"), py::arg("ranks"), py::arg("before"), py::arg("device"),
             py::arg("stream"), py::arg("records"), py::arg("parts"), py::arg("rows"), py::arg("entropy"), py::arg("n"),
             py::arg("target_ids"), py::arg("scales"), py::arg("scale"), py::arg("cut"), py::arg("ids"),
             py::arg("logp"), py::arg("rank"), py::arg("fold"),
             "Ids and log-probs of the best of all ranks, the target's rank, and its fold.");
  module.def("sm90_topk_rows", &scan_and_finish, py::arg("logits"), py::arg("row_stride"), py::arg("valid"),
             py::arg("vocab_start"), py::arg("device"), py::arg("stream"), py::arg("records"), py::arg("parts"),
             py::arg("rows"), py::arg("entropy"), py::arg("n"), py::arg("target_ids"), py::arg("scales"),
             py::arg("scale"), py::arg("cut"), py::arg("ids"), py::arg("logp"), py::arg("rank"), py::arg("fold"),
             "The same at once from logits that are whole rows.");
  module.def("sm90_topk_target", &target, py::arg("device"), py::arg("stream"), py::arg("element"), py::arg("rows"),
             py::arg("depth"), py::arg("hidden"), py::arg("hidden_row"), py::arg("weight"), py::arg("weight_row"),
             py::arg("bias"), py::arg("bias_element"), py::arg("softcap"), py::arg("vocab_start"), py::arg("valid"),
             py::arg("target_ids"), py::arg("place"), "The places of targets that are columns here, else -2^63.");
  module.def(
      "sm90_topk_forward", &forward, py::arg("device"), py::arg("stream"), py::arg("element"), py::arg("rows"),
      py::arg("depth"), py::arg("columns"), py::arg("hidden"), py::arg("hidden_row"), py::arg("weight"),
      py::arg("weight_row"), py::arg("bias"), py::arg("bias_element"), py::arg("target_ids"), py::arg("vocab_start"),
      py::arg("row_inv_temperature"), py::arg("inv_temperature"), py::arg("softcap"), py::arg("cut"),
      py::arg("records"), py::arg("n"), py::arg("place"), py::arg("best"), py::arg("before"), py::arg("workspace"),
      "Records of columns that follow others, the best of both, and the count of better ones; the bytes it takes.");
}

}  // namespace vocabshard::sm90
