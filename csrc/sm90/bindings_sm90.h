#pragma once

#include <pybind11/pybind11.h>

namespace vocabshard::sm90 {
void register_sm90(pybind11::module_& module);
void register_logits(pybind11::module_& module);
}  // namespace vocabshard::sm90
