// The best columns and the target's rank, for vocabshard._C. Pointers come as integers, 0 for none; strides in
// elements. Calls are positional: with few rows their cost is the host's.
#include "sm90/bindings_device.h"
#include "sm90/topk.h"

namespace vocabshard::sm90 {

namespace {

namespace py = pybind11;

void scan(int device, uintptr_t stream, uintptr_t logits, int64_t row_stride, int64_t rows, int64_t valid,
          int64_t vocab_start, int32_t n, uintptr_t target_ids, uintptr_t place, uintptr_t best, uintptr_t before) {
  const OnDevice guard(device);
  launch_topk_scan({pointer<float>(logits), row_stride, rows, valid, vocab_start, n, pointer<int64_t>(target_ids),
                    pointer<int64_t>(place), pointer<int64_t>(best), pointer<int64_t>(before)},
                   as_stream(stream));
}

void finish(int device, uintptr_t stream, uintptr_t records, int64_t parts, int64_t rows, bool entropy, uintptr_t best,
            int64_t ranks, int32_t n, uintptr_t before, uintptr_t target_ids, uintptr_t scales, float scale,
            uintptr_t cut, uintptr_t ids, uintptr_t logp, uintptr_t rank, const FoldRows& fold) {
  const OnDevice guard(device);
  launch_topk_finish({pointer<int64_t>(records), parts, rows, entropy, pointer<int64_t>(best), ranks, n,
                      pointer<int64_t>(before), pointer<int64_t>(target_ids), pointer<float>(scales), scale,
                      pointer<int64_t>(cut), pointer<int64_t>(ids), pointer<float>(logp), pointer<int64_t>(rank), fold},
                     as_stream(stream));
}

}  // namespace

void register_topk(py::module_& module) {
  module.attr("TOPK_MOST") = kMostTop;
  module.def("sm90_topk_fits", &topk_scan_fits, py::arg("valid"), py::arg("n"));
  module.def("sm90_topk_scan", &scan, py::arg("device"), py::arg("stream"), py::arg("logits"), py::arg("row_stride"),
             py::arg("rows"), py::arg("valid"), py::arg("vocab_start"), py::arg("n"), py::arg("target_ids"),
             py::arg("place"), py::arg("best"), py::arg("before"),
             "The n best places of rows of logits, and how many are larger than the target's.");
  module.def("sm90_topk_finish", &finish, py::arg("device"), py::arg("stream"), py::arg("records"), py::arg("parts"),
             py::arg("rows"), py::arg("entropy"), py::arg("best"), py::arg("ranks"), py::arg("n"), py::arg("before"),
             py::arg("target_ids"), py::arg("scales"), py::arg("scale"), py::arg("cut"), py::arg("ids"),
             py::arg("logp"), py::arg("rank"), py::arg("fold"),
             "Ids and log-probs of the best of all ranks, the target's rank, and its fold.");
}

}  // namespace vocabshard::sm90
