// The fused forward and the fold of vocabshard._C: pointers come as integers, 0 for none; strides in elements. The
// caller names device and stream; the thread's current device is afterwards what it was. The forward's calls are
// positional: with few rows their cost is the host's.
#include "build.h"
#include "sm90/bindings_device.h"
#include "sm90/bindings_sampling.h"
#include "sm90/bindings_topk.h"
#include "sm90/launch.h"
#include "sm90/sampling_stream.h"

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

FoldRows fold_rows(int64_t ignore_index, int64_t real_vocab_size, bool invalid_is_nan, uintptr_t logp, uintptr_t lse,
                   uintptr_t entropy, uintptr_t lse2_int, uintptr_t lse2_frac, uintptr_t maximum) {
  return {ignore_index,
          true,
          real_vocab_size,
          invalid_is_nan,
          pointer<float>(logp),
          pointer<float>(lse),
          pointer<float>(entropy),
          pointer<int32_t>(lse2_int),
          pointer<float>(lse2_frac),
          pointer<float>(maximum)};
}

KeptRows kept_rows(uintptr_t codes, int64_t codes_row, uintptr_t references, int64_t references_group, int32_t rows,
                   int32_t groups) {
  return {pointer<uint16_t>(codes), codes_row, pointer<float>(references), references_group, rows, groups};
}

// Where a call that samples from logits keeps what it works with, in bytes from the start of its workspace.
struct SampleSpace {
  int64_t uncut, records, stream, logits, bytes;
  int64_t logits_row;  // elements: rows begin on 128 bytes
  bool streams;

  SampleSpace(const ForwardCall& call, bool truncates) {
    const auto up = [](int64_t x, int64_t to) { return (x + to - 1) / to * to; };
    const int64_t of_stream = call.rows * sampling_stream_row_bytes();
    streams = truncates && of_stream <= kMostStreamBytes;
    logits_row = up(call.columns, 32);
    uncut = up(plan_forward(call, multiprocessor_count()).workspace, 256);
    records = uncut + up(4 * 8 * call.rows, 256);
    stream = records + up(4 * 8 * call.rows, 256);
    logits = stream + (streams ? up(of_stream, 256) : 0);
    bytes = logits + 4 * call.rows * logits_row;
  }
};

void sample(DeviceForward& forward, const SamplingSteps& steps, uintptr_t stream, uintptr_t workspace,
            int64_t vocab_start, int64_t valid, uintptr_t bias, int32_t bias_element, uintptr_t row_inv_temperature,
            float inv_temperature, float softcap, int64_t seed, uintptr_t row_keys, uintptr_t drawn, uintptr_t cut,
            const FoldRows& fold) {
  const OnDevice guard(forward.device);
  ForwardCall& call = forward.call;
  const SampleSpace space(call, steps.count > 0);
  call.workspace = pointer<void>(workspace);
  call.target_ids = pointer<int64_t>(row_keys);  // any: the tokens replace them
  call.vocab_start = vocab_start, call.valid = valid;
  call.bias = pointer<void>(bias), call.bias_element = bias_element;
  call.row_inv_temperature = pointer<float>(row_inv_temperature), call.inv_temperature = inv_temperature;
  call.softcap = softcap;
  call.logits = pointer<float>(workspace + space.logits), call.logits_row = space.logits_row;
  call.records = pointer<int64_t>(workspace + space.uncut);

  SamplingRows rows = {};
  rows.logits = call.logits, rows.row_stride = call.logits_row, rows.rows = call.rows, rows.valid = valid;
  rows.vocab_start = vocab_start, rows.scales = call.row_inv_temperature, rows.scale = inv_temperature;
  rows.whole = true;
  steps.of(rows);
  rows.cut = pointer<int64_t>(cut);
  rows.draw = true, rows.seed = seed, rows.row_keys = pointer<int64_t>(row_keys), rows.drawn = pointer<int64_t>(drawn);
  rows.records_there = steps.count == 0;
  rows.records = rows.records_there ? call.records : pointer<int64_t>(workspace + space.records);
  SamplingStream sampling = {rows, call.records, {}, nullptr, false, true, fold};
  if (space.streams) sampling.workspace = pointer<void>(workspace + space.stream);
  const int32_t multiprocessors = multiprocessor_count();
  sampling.maxima_there = space.streams && gives_maxima(call, multiprocessors) &&
                          streams_beside(rows, schedule_of_few(call, multiprocessors));
  call.maxima = sampling.maxima_there ? sampling_stream_maxima(rows, sampling.workspace) : GroupMaxima{};
  launch_forward(call, as_stream(stream), sampling.maxima_there ? &sampling.unmerged : nullptr);
  if (launch_sampling(sampling, as_stream(stream))) return;

  FoldCall last = {};
  last.records = rows.records, last.ranks = 1, last.rows = call.rows, last.fold = fold;
  last.target_ids = rows.drawn + call.rows;
  launch_fold(last, as_stream(stream));
}

DrawRows draw_rows(int64_t seed, uintptr_t row_keys) { return {true, seed, pointer<int64_t>(row_keys)}; }

}  // namespace

void register_sm90(py::module_& module) {
  register_backward(module);
  register_sampling(module);
  py::class_<FoldRows>(module, "FoldRows", "How rows are folded, and where their results go.")
      .def(py::init(&fold_rows), py::arg("ignore_index"), py::arg("real_vocab_size"), py::arg("invalid_is_nan"),
           py::arg("logp"), py::arg("lse"), py::arg("entropy"), py::arg("lse2_int"), py::arg("lse2_frac"),
           py::arg("maximum"));
  py::class_<KeptRows>(module, "KeptRows", "Where a forward leaves codes and references of its first rows.")
      .def(py::init(&kept_rows), py::arg("codes"), py::arg("codes_row"), py::arg("references"),
           py::arg("references_group"), py::arg("rows"), py::arg("groups"));
  py::class_<DrawRows>(module, "DrawRows", "What tokens are drawn with; row_keys 0: 0, 1, 2, ...")
      .def(py::init(&draw_rows), py::arg("seed"), py::arg("row_keys"));
  py::class_<DeviceForward>(module, "Sm90Forward", "A forward of `hidden` and `weight`, to be planned and launched.")
      .def(py::init(&forward_call), py::arg("device"), py::arg("element"), py::arg("rows"), py::arg("depth"),
           py::arg("columns"), py::arg("hidden"), py::arg("hidden_row"), py::arg("hidden_column"), py::arg("weight"),
           py::arg("weight_row"), py::arg("weight_column"), py::arg("entropy"), py::arg("path"))
      .def(
          "draw",
          [](DeviceForward& forward, const DrawRows& draw, int64_t vocab_start, uintptr_t tokens, uintptr_t cut) {
            ForwardCall& call = forward.call;
            call.draw = draw, call.vocab_start = vocab_start;
            call.drawn = {pointer<int64_t>(tokens), pointer<int64_t>(cut)};
            const OnDevice guard(forward.device);
            return draws_beside(call, multiprocessor_count());
          },
          py::arg("draw"), py::arg("vocab_start"), py::arg("tokens"), py::arg("cut"),
          "Before the plan: tokens are to be drawn. Whether this forward can; records are then [6, rows].")
      .def(
          "sample_bytes",
          [](const DeviceForward& forward, const SamplingSteps& steps) {
            const OnDevice guard(forward.device);
            return SampleSpace(forward.call, steps.count > 0).bytes;
          },
          py::arg("steps"), "Of workspace.")
      .def("sample", &sample, py::arg("steps"), py::arg("stream"), py::arg("workspace"), py::arg("vocab_start"),
           py::arg("valid"), py::arg("bias"), py::arg("bias_element"), py::arg("row_inv_temperature"),
           py::arg("inv_temperature"), py::arg("softcap"), py::arg("seed"), py::arg("row_keys"), py::arg("drawn"),
           py::arg("cut"), py::arg("fold"),
           "Tokens of whole rows from their logits: arrivals, ids and orders [3, rows], cuts, folded rows.")
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
          [](DeviceForward& forward, uintptr_t stream, uintptr_t workspace, uintptr_t target_ids, int64_t vocab_start,
             int64_t valid, uintptr_t bias, int32_t bias_element, uintptr_t row_inv_temperature, float inv_temperature,
             float softcap, uintptr_t logits, int64_t logits_row, uintptr_t records, const FoldRows& fold,
             uintptr_t cut, const KeptRows& kept) {
            ForwardCall& call = forward.call;
            call.workspace = pointer<void>(workspace);
            call.target_ids = pointer<int64_t>(target_ids);
            call.vocab_start = vocab_start, call.valid = valid;
            call.bias = pointer<void>(bias), call.bias_element = bias_element;
            call.row_inv_temperature = pointer<float>(row_inv_temperature), call.inv_temperature = inv_temperature;
            call.softcap = softcap, call.cut = pointer<int64_t>(cut), call.maxima = {};
            call.logits = pointer<float>(logits), call.logits_row = logits_row;
            call.records = pointer<int64_t>(records), call.fold = fold, call.kept = kept;
            const OnDevice guard(forward.device);
            launch_forward(call, as_stream(stream));
          },
          py::arg("stream"), py::arg("workspace"), py::arg("target_ids"), py::arg("vocab_start"), py::arg("valid"),
          py::arg("bias"), py::arg("bias_element"), py::arg("row_inv_temperature"), py::arg("inv_temperature"),
          py::arg("softcap"), py::arg("logits"), py::arg("logits_row"), py::arg("records"), py::arg("fold"),
          py::arg("cut") = 0, py::arg("kept") = KeptRows{},
          "Records, or with records == 0 the folded rows; what is kept of the first rows.");

  register_topk(module);
  module.def(
      "sm90_fold_drawn",
      [](int device, uintptr_t records, int64_t ranks, int64_t rows, const FoldRows& fold, uintptr_t tokens,
         uintptr_t cut, uintptr_t stream) {
        FoldCall call = {};
        call.records = pointer<int64_t>(records), call.ranks = ranks, call.rows = rows, call.fold = fold;
        const OnDevice guard(device);
        launch_fold_drawn(call, {pointer<int64_t>(tokens), pointer<int64_t>(cut)}, as_stream(stream));
      },
      py::arg("device"), py::arg("records"), py::arg("ranks"), py::arg("rows"), py::arg("fold"), py::arg("tokens"),
      py::arg("cut"), py::arg("stream"), "Folds [ranks, 6, rows] records with winners: tokens and their log-probs.");

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
        call.target_ids = pointer<int64_t>(target_ids), call.entropy = entropy;
        call.fold = fold_rows(0, real_vocab_size, invalid_is_nan, logp, lse, entropy_out, lse2_int, lse2_frac, maximum);
        call.fold.has_ignore_index = !ignore_index.is_none();
        if (call.fold.has_ignore_index) call.fold.ignore_index = ignore_index.cast<int64_t>();
        const OnDevice guard(device);
        launch_fold(call, as_stream(stream));
      },
      py::kw_only(), py::arg("device"), py::arg("records"), py::arg("ranks"), py::arg("rows"), py::arg("target_ids"),
      py::arg("ignore_index"), py::arg("real_vocab_size"), py::arg("invalid_is_nan"), py::arg("entropy"),
      py::arg("logp"), py::arg("lse"), py::arg("entropy_out") = 0, py::arg("lse2_int"), py::arg("lse2_frac"),
      py::arg("maximum"), py::arg("stream"), "Folds [ranks, words, rows] records in ascending order of ranks.");
}

}  // namespace vocabshard::sm90
