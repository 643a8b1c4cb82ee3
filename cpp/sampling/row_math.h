// The passes over a whole row of logits. Everything that costs time in sampling is here; compiled for AVX2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace castiron::row_math {

// Rows are worked on in blocks: a summary per block lets later passes skip most of the row.
inline constexpr size_t kBlock = 64;

[[nodiscard]] constexpr size_t num_blocks(size_t elements) { return (elements + kBlock - 1) / kBlock; }

struct Scan {
    float max;
    bool has_nan;
};

// The largest entry; block_max[b] is that of block b.
[[nodiscard]] Scan scan(std::span<const float> row, std::span<float> block_max);

// The first position of `max`, given what scan() found.
[[nodiscard]] int32_t first_position(std::span<const float> row, std::span<const float> block_max, float max);

// weights[i] = exp((row[i] - max) * scale), and 0 where that is below exp(-87). Returns their sum; block_mass[b]
// is that of block b.
double weigh(std::span<const float> row, float max, float scale, std::span<float> weights,
             std::span<float> block_mass);

// sum of exp(row[i] - max).
[[nodiscard]] double sum_exp(std::span<const float> row, float max);

struct Mass {
    double sum;
    int64_t count;
};

// Of the weights >= threshold.
[[nodiscard]] Mass mass_from(std::span<const float> weights, float threshold);

// A cut through tokens in order of falling weight, ties in order of rising id: the last one kept.
struct Cut {
    float weight;
    int32_t id;

    [[nodiscard]] bool keeps(float other, int32_t other_id) const {
        return other > weight || (other == weight && other_id <= id);
    }
};

// Sum of the weights that the cut keeps; block_mass[b] is that of block b.
double kept_mass(std::span<const float> weights, Cut cut, std::span<float> block_mass);

}  // namespace castiron::row_math
