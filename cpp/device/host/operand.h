// Values and weights of a program, checked and resolved to addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "program/program.h"

namespace castiron::host {

// A value: where it lies in the arena and how its rows are spaced.
struct Operand {
    std::string name;
    DType dtype = DType::kF32;
    std::vector<Dim> shape;
    uint64_t offset = 0;  // bytes from the arena's start, views resolved
    int64_t row_stride =
        0;  // elements between rows of a two-dimensional value: its base's row length for a view
    bool view = false;
    uint64_t end = 0;  // bytes: one past the last element at the program's limits
    // Only products read it that take rows of bf16, so who makes it may write such (rounded_values.h).
    bool may_round = false;
    bool rounded = false;  // it does: rows are bf16_row_bytes apart

    [[nodiscard]] bool overlaps(const Operand& other) const {
        return offset < other.end && other.offset < end;
    }
};

struct ResolvedWeight {
    const Weight* weight = nullptr;
    const std::byte* data = nullptr;  // the device's own copy
    size_t bytes = 0;                 // as the layout stores it
    uint64_t offset = 0;              // in the device's weight memory
};

// Checks every value: known dtypes, sizes that fit the arena at the limits, views inside their base.
// Throws std::invalid_argument.
[[nodiscard]] std::vector<Operand> resolve_values(const Program& program);

// Checks every weight's layout and size. `data` is filled once the weights have memory.
[[nodiscard]] std::vector<ResolvedWeight> resolve_weights(const Program& program);

[[nodiscard]] std::string shape_text(const std::vector<Dim>& shape);

}  // namespace castiron::host
