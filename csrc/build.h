// What this build is. build.cpp alone is compiled anew whenever any source changes.
#pragma once

namespace pybind11 {
class module_;
}

namespace vocabshard {

extern const char* const kBuild;  // version and fingerprint
extern const bool kHasCuda;

void register_cuda(pybind11::module_& module);  // nothing in a build without

namespace sm90 {
void register_sm90(pybind11::module_& module);
}

}  // namespace vocabshard
