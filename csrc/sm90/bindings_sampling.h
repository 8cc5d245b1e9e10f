// Sampling kernels over a block of fp32 logits, for vocabshard._C. Pointers come as integers, 0 for none; strides in
// elements. Compiled with bindings_sm90.cpp.
#pragma once

#include <string>

#include "sm90/bindings_device.h"
#include "sm90/sampling_launch.h"
#include "sm90/sampling_stream.h"

namespace vocabshard::sm90 {

namespace {

namespace py = pybind11;

SamplingKind kind_of(const std::string& name) {
  if (name == "top_k") return kTopK;
  if (name == "top_p") return kTopP;
  if (name == "min_p") return kMinP;
  if (name == "greedy") return kGreedy;
  throw std::invalid_argument("sampling: a step is top_k, top_p, min_p or greedy, got " + name);
}

SamplingSteps steps_of(const py::list& steps) {
  SamplingSteps found = {};
  if (steps.size() > kMostSamplingSteps)
    throw std::invalid_argument("sampling: at most " + std::to_string(kMostSamplingSteps) +
                                " truncations in one launch");
  for (const py::handle& given : steps) {  // (kind, number, scaled)
    const auto parts = given.cast<py::tuple>();
    SamplingStep& step = found.step[found.count++];
    step.kind = kind_of(parts[0].cast<std::string>());
    step.scaled = parts[2].cast<bool>();
    if (step.kind == kMinP)
      step.ln = parts[1].cast<double>();
    else
      step.number = parts[1].cast<int64_t>();
  }
  return found;
}

void rows(int device, uintptr_t stream, uintptr_t logits, int64_t row_stride, int64_t rows, int64_t valid,
          int64_t vocab_start, uintptr_t scales, float scale, bool whole, const py::list& steps, uintptr_t given_cut,
          uintptr_t cut, bool draw, int64_t seed, uintptr_t row_keys, uintptr_t drawn, uintptr_t target_ids,
          uintptr_t records, bool records_there, int32_t best_count, uintptr_t best, uintptr_t place, uintptr_t before,
          uintptr_t maxima, uintptr_t uncut, uintptr_t workspace) {
  SamplingRows call = {};
  call.logits = pointer<float>(logits), call.row_stride = row_stride, call.rows = rows, call.valid = valid;
  call.vocab_start = vocab_start, call.scales = pointer<float>(scales), call.scale = scale;
  call.whole = whole;
  steps_of(steps).of(call);
  if (best_count < 0 || best_count > kMostBest)
    throw std::invalid_argument("sampling: at most " + std::to_string(kMostBest) + " best columns in one launch");
  call.given_cut = pointer<int64_t>(given_cut), call.cut = pointer<int64_t>(cut);
  call.draw = draw, call.seed = seed, call.row_keys = pointer<int64_t>(row_keys), call.drawn = pointer<int64_t>(drawn);
  call.target_ids = pointer<int64_t>(target_ids), call.records = pointer<int64_t>(records);
  call.records_there = records_there;
  call.best_count = best_count, call.best = pointer<int64_t>(best);
  call.place = pointer<int64_t>(place), call.before = pointer<int64_t>(before);
  call.maxima = pointer<int64_t>(maxima);
  const OnDevice guard(device);
  launch_sampling({call, pointer<int64_t>(uncut), {}, pointer<void>(workspace), false, false, {}}, as_stream(stream));
}

void histogram(int device, uintptr_t stream, uintptr_t logits, int64_t row_stride, int64_t rows, int64_t valid,
               int64_t vocab_start, uintptr_t scales, float scale, uintptr_t k_max, uintptr_t cut, uintptr_t prefix,
               int32_t level, uintptr_t counts, uintptr_t masses) {
  SamplingHistogram call = {};
  call.logits = pointer<float>(logits), call.row_stride = row_stride, call.rows = rows, call.valid = valid;
  call.vocab_start = vocab_start, call.scales = pointer<float>(scales), call.scale = scale;
  call.k_max = pointer<int32_t>(k_max), call.cut = pointer<int64_t>(cut), call.prefix = pointer<int64_t>(prefix);
  call.level = level, call.counts = pointer<int64_t>(counts), call.masses = pointer<int64_t>(masses);
  const OnDevice guard(device);
  launch_sampling_histogram(call, as_stream(stream));
}

void equal(int device, uintptr_t stream, uintptr_t logits, int64_t row_stride, int64_t rows, int64_t valid,
           int64_t vocab_start, uintptr_t order, uintptr_t nth, uintptr_t out) {
  const OnDevice guard(device);
  launch_sampling_equal(pointer<float>(logits), row_stride, rows, valid, vocab_start, pointer<int64_t>(order),
                        pointer<int64_t>(nth), pointer<int64_t>(out), as_stream(stream));
}

}  // namespace

inline void register_sampling(py::module_& module) {
  py::class_<SamplingSteps>(module, "SamplingSteps", "Truncations (kind, number, scaled) of a program.")
      .def(py::init(&steps_of), py::arg("steps"));
  module.attr("SAMPLING_COLUMNS") = sampling_rows_columns();
  module.attr("SAMPLING_STREAM_BYTES") = sampling_stream_row_bytes();
  module.attr("SAMPLING_STEPS") = kMostSamplingSteps;
  module.attr("SAMPLING_BEST") = kMostBest;
  module.def(
      "sm90_sampling_rows", &rows, py::kw_only(), py::arg("device"), py::arg("stream"), py::arg("logits"),
      py::arg("row_stride"), py::arg("rows"), py::arg("valid"), py::arg("vocab_start"), py::arg("scales"),
      py::arg("scale"), py::arg("whole") = false, py::arg("steps") = py::list(), py::arg("given_cut") = 0,
      py::arg("cut") = 0, py::arg("draw") = false, py::arg("seed") = 0, py::arg("row_keys") = 0, py::arg("drawn") = 0,
      py::arg("target_ids") = 0, py::arg("records") = 0, py::arg("records_there") = false, py::arg("best_count") = 0,
      py::arg("best") = 0, py::arg("place") = 0, py::arg("before") = 0, py::arg("maxima") = 0, py::arg("uncut") = 0,
      py::arg("workspace") = 0,
      "Cuts, tokens, truncated records, best columns and ranks, as far as there is memory for them. With the "
      "records of all columns and SAMPLING_STREAM_BYTES a row of workspace, by grids that stream rows, if they can.");
  module.def("sm90_sampling_histogram", &histogram, py::kw_only(), py::arg("device"), py::arg("stream"),
             py::arg("logits"), py::arg("row_stride"), py::arg("rows"), py::arg("valid"), py::arg("vocab_start"),
             py::arg("scales"), py::arg("scale"), py::arg("k_max"), py::arg("cut"), py::arg("prefix"), py::arg("level"),
             py::arg("counts"), py::arg("masses"), "Adds to counts and masses [rows, bins].");
  module.def("sm90_sampling_equal", &equal, py::kw_only(), py::arg("device"), py::arg("stream"), py::arg("logits"),
             py::arg("row_stride"), py::arg("rows"), py::arg("valid"), py::arg("vocab_start"), py::arg("order"),
             py::arg("nth"), py::arg("out"), "The nth column of an order in each row, or -1.");
}

}  // namespace vocabshard::sm90
