// The module and its CPU side; csrc/sm90/bindings_sm90.cpp adds the CUDA side. Pointers come as integers
// (tensor.data_ptr()), 0 for an absent one; callers check shapes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "api.h"
#include "build.h"
#include "contract.h"
#include "cpu/threads.h"

namespace py = pybind11;
using namespace vocabshard;

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Unlocked = py::call_guard<py::gil_scoped_release>;

py::dict contract() {
  const std::vector<double> log2 = VS_LOG2_COEFFICIENTS;
  py::dict d;
  d["id"] = kContractId;
  d["contract_id"] = kContractId;
  d["tile"] = kTile;
  d["limb_bits"] = kLimbBits;
  d["limbs"] = kLimbs;
  d["scale"] = kScale;
  d["span"] = kSpan;
  d["headroom"] = kHeadroom;
  d["entropy_headroom"] = kEntropyHeadroom;
  d["empty_k"] = kEmptyK;
  d["logit_limit"] = kLogitLimit;
  d["magic"] = kMagic;
  d["magic_bits"] = kMagicBits;
  d["log2e"] = kLog2e;
  d["inv_log2e"] = kInvLog2e;
  d["ln2"] = kLn2;
  d["sqrt2"] = kSqrt2;
  d["exp_degree"] = kExpDegree;
  d["exp"] = std::vector<float>{kExp1, kExp2, kExp3, kExp4, kExp5, kExp6};
  d["tanh"] = std::vector<float>{kTanh1, kTanh2, kTanh3};
  d["tanh_small"] = kTanhSmall;
  d["tanh_one"] = kTanhOne;
  d["log2_terms"] = kLog2Terms;
  d["log2"] = log2;
  d["nan_bits"] = kNanBits;
  d["neg_inf_bits"] = kNegInfBits;
  d["record_words"] = kRecordWords;
  d["record_words_entropy"] = kRecordWordsEntropy;
  return d;
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

py::dict build_info() {
  std::vector<std::string> compiled, usable;
  for (int isa = 0; isa < 3; ++isa) {
    if (cpu_isa_compiled() >> isa & 1) compiled.emplace_back(cpu_isa_name(isa));
    if (cpu_isa_usable() >> isa & 1) usable.emplace_back(cpu_isa_name(isa));
  }
  py::dict d;
  d["build"] = kBuild;
  d["cuda"] = kHasCuda;
  d["compiler"] = compiler();
  d["cpu_compiled"] = compiled;
  d["cpu_usable"] = usable;
  d["cpu_chosen"] = cpu_isa_name(cpu_isa_chosen());
  return d;
}

void bind_structs(py::module_& m) {
  m.attr("F32") = static_cast<int>(kF32);
  m.attr("BF16") = static_cast<int>(kBF16);
  m.attr("F16") = static_cast<int>(kF16);
  py::class_<Matrix>(m, "Matrix")
      .def(py::init([](uintptr_t data, int dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
             return Matrix{pointer<void>(data), dtype, rows, cols, row_stride, col_stride};
           }),
           py::arg("data") = 0, py::arg("dtype") = 0, py::arg("rows") = 0, py::arg("cols") = 0,
           py::arg("row_stride") = 0, py::arg("col_stride") = 1);
  py::class_<Vector>(m, "Vector")
      .def(py::init(
               [](uintptr_t data, int dtype, int64_t stride) { return Vector{pointer<void>(data), dtype, stride}; }),
           py::arg("data") = 0, py::arg("dtype") = 0, py::arg("stride") = 1);
  py::class_<RowInputs>(m, "RowInputs")
      .def(py::init([](uintptr_t target_ids, uintptr_t inv_temperature, double scalar_inv_temperature, uintptr_t cut) {
             const cpu::PlainFloat plain;  // the reciprocal may be subnormal
             return RowInputs{pointer<int64_t>(target_ids), pointer<float>(inv_temperature),
                              static_cast<float>(scalar_inv_temperature), pointer<int64_t>(cut)};
           }),
           py::arg("target_ids"), py::arg("inv_temperature") = 0, py::arg("scalar_inv_temperature") = 1.0,
           py::arg("cut") = 0);
  py::class_<SamplingBlock>(m, "SamplingBlock")
      .def(py::init([](const Matrix& logits, int64_t vocab_start, int64_t valid, uintptr_t scales, double scale) {
             const cpu::PlainFloat plain;
             return SamplingBlock{logits, vocab_start, valid, pointer<float>(scales), static_cast<float>(scale)};
           }),
           py::arg("logits"), py::arg("vocab_start"), py::arg("valid"), py::arg("scales") = 0, py::arg("scale") = 1.0);
  py::class_<Problem>(m, "Problem")
      .def(py::init([](int64_t vocab_start, int64_t valid, float softcap, bool entropy) {
             return Problem{vocab_start, valid, softcap, entropy};
           }),
           py::arg("vocab_start"), py::arg("valid"), py::arg("softcap") = 0.0f, py::arg("entropy") = false);
  py::class_<RowGradients>(m, "RowGradients")
      .def(py::init([](uintptr_t lse2_int, uintptr_t lse2_frac, uintptr_t row_entropy, uintptr_t target,
                       uintptr_t softmax, uintptr_t entropy) {
             return RowGradients{pointer<int32_t>(lse2_int), pointer<float>(lse2_frac), pointer<float>(row_entropy),
                                 pointer<float>(target),     pointer<float>(softmax),   pointer<float>(entropy)};
           }),
           py::arg("lse2_int"), py::arg("lse2_frac"), py::arg("row_entropy"), py::arg("target"), py::arg("softmax"),
           py::arg("entropy"));
  py::class_<GradientPlan>(m, "GradientPlan")
      .def(py::init([](bool continue_hidden, bool add_weight, const Matrix& kept) {
             return GradientPlan{continue_hidden, add_weight, kept};
           }),
           py::arg("continue_hidden"), py::arg("add_weight"), py::arg("kept"));
  py::class_<CpuRun>(m, "CpuRun")
      .def(py::init([](int threads, int isa) { return CpuRun{threads, isa}; }), py::arg("threads") = 1,
           py::arg("isa") = -1);
}

void bind_cpu(py::module_& m) {
  m.def(
      "cpu_linear_forward",
      [](const Matrix& hidden, const Matrix& weight, const Vector& bias, const RowInputs& rows, const Problem& problem,
         uintptr_t records, const Matrix& logits, const Matrix& kept, const CpuRun& run) {
        cpu_linear_forward(hidden, weight, bias, rows, problem, pointer<int64_t>(records), logits, kept, run);
      },
      py::arg("hidden"), py::arg("weight"), py::arg("bias"), py::arg("rows"), py::arg("problem"), py::arg("records"),
      py::arg("logits"), py::arg("kept"), py::arg("run"), Unlocked());
  m.def("cpu_linear_backward", &cpu_linear_backward, py::arg("hidden"), py::arg("weight"), py::arg("bias"),
        py::arg("rows"), py::arg("problem"), py::arg("gradients"), py::arg("grad_hidden"), py::arg("grad_weight"),
        py::arg("grad_bias"), py::arg("how"), py::arg("run"), Unlocked());
  m.def(
      "cpu_logits_forward",
      [](const Matrix& logits, uintptr_t source, int64_t outputs, const RowInputs& rows, const Problem& problem,
         uintptr_t records, const CpuRun& run) {
        cpu_logits_forward(logits, pointer<int64_t>(source), outputs, rows, problem, pointer<int64_t>(records), run);
      },
      py::arg("logits"), py::arg("source"), py::arg("outputs"), py::arg("rows"), py::arg("problem"), py::arg("records"),
      py::arg("run"), Unlocked());
  m.def(
      "cpu_logits_backward",
      [](const Matrix& logits, uintptr_t source, int64_t outputs, const RowInputs& rows, const Problem& problem,
         const RowGradients& gradients, const Matrix& grad_logits, const CpuRun& run) {
        cpu_logits_backward(logits, pointer<int64_t>(source), outputs, rows, problem, gradients, grad_logits, run);
      },
      py::arg("logits"), py::arg("source"), py::arg("outputs"), py::arg("rows"), py::arg("problem"),
      py::arg("gradients"), py::arg("grad_logits"), py::arg("run"), Unlocked());
  m.def(
      "cpu_reciprocals",
      [](uintptr_t t, int64_t count, uintptr_t out) { cpu_reciprocals(pointer<float>(t), count, pointer<float>(out)); },
      py::arg("t"), py::arg("count"), py::arg("out"), Unlocked());
  m.def(
      "cpu_fold",
      [](uintptr_t gathered, int64_t world_size, int64_t words, int64_t rows, uintptr_t target_ids,
         int64_t ignore_index, int64_t real_vocab_size, bool invalid_is_nan, uintptr_t logp, uintptr_t lse,
         uintptr_t entropy, uintptr_t lse2_int, uintptr_t lse2_frac, uintptr_t maximum) {
        cpu_fold(pointer<int64_t>(gathered), world_size, words, rows, pointer<int64_t>(target_ids), ignore_index,
                 real_vocab_size, invalid_is_nan,
                 {pointer<float>(logp), pointer<float>(lse), pointer<float>(entropy), pointer<int32_t>(lse2_int),
                  pointer<float>(lse2_frac), pointer<float>(maximum)});
      },
      py::arg("gathered"), py::arg("world_size"), py::arg("words"), py::arg("rows"), py::arg("target_ids"),
      py::arg("ignore_index"), py::arg("real_vocab_size"), py::arg("invalid_is_nan"), py::arg("logp"), py::arg("lse"),
      py::arg("entropy"), py::arg("lse2_int"), py::arg("lse2_frac"), py::arg("maximum"), Unlocked());
}

void bind_sampling(py::module_& m) {
  using Block = SamplingBlock;
  m.def(
      "cpu_sampling_maxima",
      [](const Block& block, uintptr_t out, const CpuRun& run) {
        cpu_sampling_maxima(block, pointer<int64_t>(out), run);
      },
      py::arg("block"), py::arg("out"), py::arg("run"), Unlocked());
  m.def(
      "cpu_sampling_histogram",
      [](const Block& block, uintptr_t k_max, uintptr_t cut, uintptr_t prefix, int level, uintptr_t counts,
         uintptr_t masses, const CpuRun& run) {
        cpu_sampling_histogram(block, pointer<int32_t>(k_max), pointer<int64_t>(cut), pointer<int64_t>(prefix), level,
                               pointer<int64_t>(counts), pointer<int64_t>(masses), run);
      },
      py::arg("block"), py::arg("k_max"), py::arg("cut"), py::arg("prefix"), py::arg("level"), py::arg("counts"),
      py::arg("masses"), py::arg("run"), Unlocked());
  m.def(
      "cpu_sampling_floor",
      [](const Block& block, uintptr_t threshold, uintptr_t out, const CpuRun& run) {
        cpu_sampling_floor(block, pointer<float>(threshold), pointer<int64_t>(out), run);
      },
      py::arg("block"), py::arg("threshold"), py::arg("out"), py::arg("run"), Unlocked());
  m.def(
      "cpu_sampling_equal",
      [](const Block& block, uintptr_t order, uintptr_t nth, uintptr_t out, const CpuRun& run) {
        cpu_sampling_equal(block, pointer<int64_t>(order), pointer<int64_t>(nth), pointer<int64_t>(out), run);
      },
      py::arg("block"), py::arg("order"), py::arg("nth"), py::arg("out"), py::arg("run"), Unlocked());
  m.def(
      "cpu_sampling_draw",
      [](const Block& block, uintptr_t cut, int64_t seed, uintptr_t row_keys, uintptr_t arrival, uintptr_t id,
         uintptr_t order, const CpuRun& run) {
        cpu_sampling_draw(block, pointer<int64_t>(cut), seed, pointer<int64_t>(row_keys), pointer<int64_t>(arrival),
                          pointer<int64_t>(id), pointer<int64_t>(order), run);
      },
      py::arg("block"), py::arg("cut"), py::arg("seed"), py::arg("row_keys"), py::arg("arrival"), py::arg("id"),
      py::arg("order"), py::arg("run"), Unlocked());
  m.def(
      "cpu_sampling_best",
      [](const Block& block, int64_t count, uintptr_t out, const CpuRun& run) {
        cpu_sampling_best(block, count, pointer<int64_t>(out), run);
      },
      py::arg("block"), py::arg("count"), py::arg("out"), py::arg("run"), Unlocked());
  m.def(
      "cpu_sampling_before",
      [](const Block& block, uintptr_t place, uintptr_t out, const CpuRun& run) {
        cpu_sampling_before(block, pointer<int64_t>(place), pointer<int64_t>(out), run);
      },
      py::arg("block"), py::arg("place"), py::arg("out"), py::arg("run"), Unlocked());
  m.def(
      "spec_clock",
      [](uintptr_t x, uintptr_t second, int64_t count, uintptr_t out) {
        spec_clock(pointer<uint32_t>(x), pointer<uint32_t>(second), count, pointer<float>(out));
      },
      py::arg("x"), py::arg("second"), py::arg("count"), py::arg("out"), Unlocked());
  m.def("spec_philox", [](const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key) {
    if (counter.size() != 4 || key.size() != 2) throw std::invalid_argument("four words and a key of two");
    std::vector<uint32_t> words(4);
    spec_philox(counter.data(), key.data(), words.data());
    return words;
  });
}

void bind_fingerprint(py::module_& m) {
  m.def(
      "cpu_fingerprint",
      [](uintptr_t data, int64_t rows, int64_t row_bytes, int64_t row_stride_bytes, int64_t first_row, int threads) {
        return cpu_fingerprint(pointer<void>(data), rows, row_bytes, row_stride_bytes, first_row, threads);
      },
      py::arg("data"), py::arg("rows"), py::arg("row_bytes"), py::arg("row_stride_bytes"), py::arg("first_row"),
      py::arg("threads"), Unlocked());
}

void bind_specification(py::module_& m) {
  m.def(
      "spec_exp",
      [](uintptr_t y, int64_t count, uintptr_t k, uintptr_t p) {
        spec_exp(pointer<float>(y), count, pointer<int32_t>(k), pointer<float>(p));
      },
      py::arg("y"), py::arg("count"), py::arg("k"), py::arg("p"), Unlocked());
  m.def(
      "spec_log2",
      [](uintptr_t x, int64_t count, uintptr_t a, uintptr_t l) {
        spec_log2(pointer<double>(x), count, pointer<int32_t>(a), pointer<double>(l));
      },
      py::arg("x"), py::arg("count"), py::arg("a"), py::arg("l"), Unlocked());
  m.def(
      "spec_softcap",
      [](uintptr_t z, int64_t count, float cap, uintptr_t out) {
        spec_softcap(pointer<float>(z), count, cap, pointer<float>(out));
      },
      py::arg("z"), py::arg("count"), py::arg("cap"), py::arg("out"), Unlocked());
  m.def(
      "spec_fma_chain",
      [](const Matrix& hidden, const Matrix& weight, uintptr_t z) {
        spec_fma_chain(hidden, weight, pointer<float>(z));
      },
      py::arg("hidden"), py::arg("weight"), py::arg("z"), Unlocked());
  m.def(
      "spec_partials",
      [](uintptr_t y, int64_t rows, int64_t columns, const std::vector<int64_t>& target,
         const std::vector<int64_t>& tile_order, const std::vector<int64_t>& splits, bool entropy, uintptr_t records) {
        if (static_cast<int64_t>(target.size()) != rows) throw std::invalid_argument("one target a row");
        spec_partials(pointer<float>(y), rows, columns, target.data(), tile_order.data(),
                      static_cast<int64_t>(tile_order.size()), splits.data(), static_cast<int64_t>(splits.size()),
                      entropy, pointer<int64_t>(records));
      },
      py::arg("y"), py::arg("rows"), py::arg("columns"), py::arg("target"), py::arg("tile_order"), py::arg("splits"),
      py::arg("entropy"), py::arg("records"), Unlocked());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of vocabshard. Private: use the functions of the package.";
  m.def("contract", &contract);
  m.def("build_info", &build_info);
  m.def("contraction_probe", &cpu_contraction_probe);
  bind_structs(m);
  bind_cpu(m);
  bind_fingerprint(m);
  bind_sampling(m);
  bind_specification(m);
  register_cuda(m);
}
