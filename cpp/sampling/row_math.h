// The passes over a whole row of logits. Everything that costs time in sampling is here, compiled twice: for
// AVX2, and for any x86-64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace castiron::row_math {

// Rows are worked on in blocks: a summary per block lets later passes skip most of the row.
inline constexpr size_t kBlock = 64;

[[nodiscard]] constexpr size_t num_blocks(size_t elements) {
    return (elements + kBlock - 1) / kBlock;
}

struct Scan {
    float max;
    bool has_nan;
};

// The largest entry; block_max[b] is that of block b.
[[nodiscard]] Scan scan(std::span<const float> row, std::span<float> block_max);

// The first position of `max`, given what scan() found.
[[nodiscard]] int32_t first_position(std::span<const float> row, std::span<const float> block_max, float max);

// The weights of a row's tokens, relative to the likeliest. All spans are scratch space of the caller's.
struct Weights {
    std::span<float> values;      // whole blocks: zeros behind the last token
    std::span<float> block_mass;  // by block, the sum
    std::span<float> block_peak;  // by block, the largest
};

// values[i] = exp((row[i] - max) * scale), and 0 where that is below exp(-87). Returns their sum.
double weigh(std::span<const float> row, float max, float scale, const Weights& weights);

// sum of exp(row[i] - max).
[[nodiscard]] double sum_exp(std::span<const float> row, float max);

struct Mass {
    double sum;
    int64_t count;
};

// Of the weights >= threshold > 0.
[[nodiscard]] Mass mass_from(const Weights& weights, float threshold);

// A cut through tokens in order of falling weight, ties in order of rising id: the last one kept.
struct Cut {
    float weight;
    int32_t id;

    [[nodiscard]] bool keeps(float other, int32_t other_id) const {
        return other > weight || (other == weight && other_id <= id);
    }
};

// Sum of the weights that the cut keeps; block_mass becomes their sums.
double kept_mass(const Weights& weights, Cut cut);

}  // namespace castiron::row_math
