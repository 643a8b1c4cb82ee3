// What a step counts, by symbol, and the grids that follow from it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "program/program.h"

namespace castiron::cuda {

inline constexpr size_t kNumSymbols = 11;

// The step's number for each symbol of Dim.
class Counts {
public:
    [[nodiscard]] int32_t& operator[](int64_t symbol) { return counts_[static_cast<size_t>(-symbol - 1)]; }
    [[nodiscard]] int32_t operator[](int64_t symbol) const {
        return counts_[static_cast<size_t>(-symbol - 1)];
    }
    // The size that a dimension has in this step.
    [[nodiscard]] int64_t bind(Dim dim) const { return dim.symbolic() ? (*this)[dim.value] : dim.value; }
    bool operator==(const Counts&) const = default;

private:
    std::array<int32_t, kNumSymbols> counts_{};
};

// The largest counts that a step of the program may have.
[[nodiscard]] Counts counts_at_limits(const Program& program);

// Blocks along one grid dimension; 0: nothing is launched.
[[nodiscard]] inline int64_t grid_blocks(const GridDim& dim, const Counts& counts, int multiprocessors) {
    const int64_t of = dim.of == 0 ? 1 : counts[dim.of];
    const int64_t blocks = dim.times * ((of + dim.per - 1) / dim.per);
    if (dim.per_sm == 0) return blocks;
    const int64_t most = int64_t{dim.per_sm} * multiprocessors;
    return blocks < most ? blocks : most;
}

[[nodiscard]] inline bool happens(const When& when, const Counts& counts) {
    return when.of == 0 || (when.low <= counts[when.of] && counts[when.of] <= when.high);
}

}  // namespace castiron::cuda
