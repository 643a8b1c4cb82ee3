// The part of a program that CUDA targets alone have: kernels and launches (docs/cuda-program.md).
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "bindings/python_value.h"
#include "program/program.h"

namespace castiron::bindings {

// Position of a value or weight by name.
using Index = std::unordered_map<std::string, int>;

// Calls visit(item, path of the item) for each entry of a list.
template <typename Visit>
void for_each(nb::handle list, const std::string& path, Visit visit) {
    size_t i = 0;
    for (nb::handle item : as_sequence(list, path)) visit(item, path + "[" + std::to_string(i++) + "]");
}

// The position of the value or weight that is named; `kind` is for the message.
[[nodiscard]] int look_up(const Index& index, nb::handle value, const std::string& path, const char* kind);

// "T", "N", ... as a symbol of Dim.
[[nodiscard]] int64_t symbol_from(nb::handle value, const std::string& path);

// Adds the kernels, with their images taken from `images`, a dict {entry: bytes} or None.
void read_kernels(nb::handle list, const std::string& path, nb::handle images, Program& program);

// Adds launches; kernels and KV layers are read before.
void read_launches(nb::handle list, const std::string& path, const Program& program, const Index& values,
                   const Index& weights, std::vector<Launch>& launches);

}  // namespace castiron::bindings
