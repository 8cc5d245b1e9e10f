#include <stdexcept>
#include <string>

#include "contract.h"
#include "cpu/kernels.h"

namespace vocabshard {
namespace {

constexpr int kIsaCount = 3;

int usable() {
  int mask = 1;
#if defined(VOCABSHARD_X86)
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (fma) mask |= 2;
  if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    mask |= 4;
#endif
  return mask;
}

const cpu::Kernels* variant(int isa) {
#if defined(VOCABSHARD_X86)
  if (isa == 1) return &cpu::avx2_kernels();
  if (isa == 2) return &cpu::avx512_kernels();
#endif
  return isa == 0 ? &cpu::base_kernels() : nullptr;
}

}  // namespace

int cpu_isa_compiled() {
  int mask = 0;
  for (int isa = 0; isa < kIsaCount; ++isa) mask |= variant(isa) ? 1 << isa : 0;
  return mask;
}

int cpu_isa_usable() {
  static const int mask = usable();
  return mask & cpu_isa_compiled();
}

int cpu_isa_chosen() {
  int isa = kIsaCount - 1;
  while (!(cpu_isa_usable() >> isa & 1)) --isa;
  return isa;
}

const char* cpu_isa_name(int isa) {
  const cpu::Kernels* kernels = variant(isa);
  return kernels ? kernels->name : "none";
}

bool cpu_contraction_probe() {
  for (int isa = 0; isa < kIsaCount; ++isa)
    if ((cpu_isa_usable() >> isa & 1) && variant(isa)->contracts()) return true;
  return false;
}

namespace cpu {

const Kernels& kernels(int isa) {
  if (isa < -1 || isa >= kIsaCount || (isa >= 0 && !(cpu_isa_usable() >> isa & 1)))
    throw std::invalid_argument("isa must be -1 (the best), or one that this build and machine have (mask " +
                                std::to_string(cpu_isa_usable()) + "), got " + std::to_string(isa));
  return *variant(isa < 0 ? cpu_isa_chosen() : isa);
}

}  // namespace cpu
}  // namespace vocabshard
