#include "build.h"

namespace vocabshard {

const char* const kBuild = VOCABSHARD_BUILD;
const bool kHasCuda = VOCABSHARD_CUDA != 0;

void register_cuda([[maybe_unused]] pybind11::module_& module) {
#if VOCABSHARD_CUDA
  sm90::register_sm90(module);
#endif
}

}  // namespace vocabshard
