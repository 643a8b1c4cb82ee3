// Where a program's values and weights lie in device memory, checked.
#pragma once

#include <cstdint>
#include <vector>

#include "device/cuda/counts.h"
#include "program/program.h"

namespace castiron::cuda {

// "f32 [N, 256]", for messages.
[[nodiscard]] std::string type_text(DType dtype, const std::vector<Dim>& shape);

// Byte offsets of the values in the arena; a view's includes its column. Throws std::invalid_argument for a
// value that does not fit, at the largest counts, into the program's arena_bytes.
[[nodiscard]] std::vector<uint64_t> value_offsets(const Program& program);

struct WeightPlaces {
    std::vector<uint64_t> offsets;  // 256-byte aligned
    uint64_t bytes = 0;             // of all weights
};

// Throws std::invalid_argument for a weight in a layout of the host or with too few bytes.
[[nodiscard]] WeightPlaces weight_places(const Program& program);

// The index of a value that the device reads or writes itself; -1 where an optional one is absent. Throws
// std::invalid_argument when it is missing or of another type.
[[nodiscard]] int find_value(const Program& program, const std::string& name, DType dtype,
                             const std::vector<Dim>& shape, bool required);

}  // namespace castiron::cuda
