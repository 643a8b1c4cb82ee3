#include "sampling/row_math.h"

#include <cstring>
#include <limits>

// GCC's and Clang's vector types rather than intrinsics: the same source serves both instruction sets.
// Everything below the dispatch at the end is inlined into it, so no code for AVX2 can leak into another
// function.
#define CASTIRON_INLINE inline __attribute__((always_inline))

namespace castiron::row_math {
namespace {

using Floats = float __attribute__((vector_size(32)));
using Ints = int32_t __attribute__((vector_size(32)));
using HalfFloats = float __attribute__((vector_size(16)));
using Doubles = double __attribute__((vector_size(32)));
constexpr size_t kLanes = 8;
static_assert(kBlock % kLanes == 0);

constexpr float kInfinity = std::numeric_limits<float>::infinity();

CASTIRON_INLINE Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

CASTIRON_INLINE void store(float* to, Floats value) {
    std::memcpy(to, &value, sizeof value);
}

CASTIRON_INLINE Floats broadcast(float value) {
    return Floats{} + value;
}

CASTIRON_INLINE Floats larger(Floats a, Floats b) {
    return a > b ? a : b;
}

CASTIRON_INLINE float largest(Floats v) {
    float best = v[0];
    for (size_t lane = 1; lane < kLanes; ++lane) best = v[lane] > best ? v[lane] : best;
    return best;
}

CASTIRON_INLINE float total(Floats v) {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

CASTIRON_INLINE double total(Doubles v) {
    return (v[0] + v[2]) + (v[1] + v[3]);
}

// The eight lanes as four sums in double: a block's mass is added up in float, the row's in double.
CASTIRON_INLINE Doubles widen(Floats v) {
    const HalfFloats low = __builtin_shufflevector(v, v, 0, 1, 2, 3);
    const HalfFloats high = __builtin_shufflevector(v, v, 4, 5, 6, 7);
    return __builtin_convertvector(low + high, Doubles);
}

// exp(x) for x <= 0, within 2 ulp; 0 below -87, where float32 ends.
CASTIRON_INLINE Floats exp_nonpositive(Floats x) {
    const Floats clamped = larger(x, broadcast(-87.0F));
    // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to the nearest integer. ln 2 in two parts
    // keeps r exact.
    const Floats shifted = clamped * 1.44269504F + 12582912.0F;
    const Floats n = shifted - 12582912.0F;
    const Floats r = (clamped - n * 0.693359375F) + n * 2.12194440e-4F;
    Floats p = broadcast(1.0F / 5040.0F);  // Taylor: the remainder r^8 / 8! is 5e-9 at most
    p = p * r + 1.0F / 720.0F;
    p = p * r + 1.0F / 120.0F;
    p = p * r + 1.0F / 24.0F;
    p = p * r + 1.0F / 6.0F;
    p = p * r + 0.5F;
    p = p * r + 1.0F;
    p = p * r + 1.0F;
    Ints bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4B400000 + 127) << 23;  // 2^n
    Floats power;
    std::memcpy(&power, &bits, sizeof power);
    return x < broadcast(-87.0F) ? Floats{} : p * power;
}

// A row in whole blocks: the last one, if cut short, is filled up with -infinity.
class Blocks {
public:
    CASTIRON_INLINE explicit Blocks(std::span<const float> row)
        : data_(row.data()), whole_(row.size() / kBlock) {
        count_ = num_blocks(row.size());
        for (size_t i = 0; i < kBlock; ++i) {
            const size_t at = whole_ * kBlock + i;
            tail_[i] = at < row.size() ? row[at] : -kInfinity;
        }
    }
    [[nodiscard]] CASTIRON_INLINE size_t count() const { return count_; }
    [[nodiscard]] CASTIRON_INLINE const float* operator[](size_t block) const {
        return block < whole_ ? data_ + block * kBlock : tail_;
    }

private:
    const float* data_;
    size_t whole_;
    size_t count_;
    float tail_[kBlock];
};

CASTIRON_INLINE Scan scan_body(std::span<const float> row, std::span<float> block_max) {
    const Blocks blocks(row);
    Floats best = broadcast(-kInfinity);
    Ints nan{};
    for (size_t block = 0; block < blocks.count(); ++block) {
        const float* x = blocks[block];
        Floats here = broadcast(-kInfinity);
        for (size_t i = 0; i < kBlock; i += kLanes) {
            const Floats value = load(x + i);
            nan |= value != value;
            here = larger(value, here);
        }
        best = larger(here, best);
        block_max[block] = largest(here);
    }
    bool has_nan = false;
    for (size_t lane = 0; lane < kLanes; ++lane) has_nan |= nan[lane] != 0;
    return {largest(best), has_nan};
}

CASTIRON_INLINE double weigh_body(std::span<const float> row, float max, float scale,
                                  const Weights& weights) {
    const Blocks blocks(row);
    Doubles sum{};
    for (size_t block = 0; block < blocks.count(); ++block) {
        const float* x = blocks[block];
        float* w = weights.values.data() + block * kBlock;
        Floats mass{};
        Floats peak{};
        for (size_t i = 0; i < kBlock; i += kLanes) {
            const Floats weight = exp_nonpositive((load(x + i) - max) * scale);
            store(w + i, weight);
            mass += weight;
            peak = larger(weight, peak);
        }
        weights.block_mass[block] = total(mass);
        weights.block_peak[block] = largest(peak);
        sum += widen(mass);
    }
    return total(sum);
}

CASTIRON_INLINE double sum_exp_body(std::span<const float> row, float max) {
    const Blocks blocks(row);
    Doubles sum{};
    for (size_t block = 0; block < blocks.count(); ++block) {
        const float* x = blocks[block];
        Floats mass{};
        for (size_t i = 0; i < kBlock; i += kLanes) mass += exp_nonpositive(load(x + i) - max);
        sum += widen(mass);
    }
    return total(sum);
}

CASTIRON_INLINE Mass mass_from_body(const Weights& weights, float threshold) {
    Doubles sum{};
    Ints count{};
    for (size_t block = 0; block < weights.block_peak.size(); ++block) {
        if (weights.block_peak[block] < threshold) continue;
        const float* w = weights.values.data() + block * kBlock;
        Floats mass{};
        for (size_t i = 0; i < kBlock; i += kLanes) {
            const Floats weight = load(w + i);
            const Ints in = weight >= threshold;
            mass += in ? weight : Floats{};
            count -= in;
        }
        sum += widen(mass);
    }
    Mass result{total(sum), 0};
    for (size_t lane = 0; lane < kLanes; ++lane) result.count += count[lane];
    return result;
}

CASTIRON_INLINE double kept_mass_body(const Weights& weights, Cut cut) {
    Doubles sum{};
    for (size_t block = 0; block < weights.block_peak.size(); ++block) {
        if (weights.block_peak[block] < cut.weight) {
            weights.block_mass[block] = 0;
            continue;
        }
        const float* w = weights.values.data() + block * kBlock;
        Floats mass{};
        Ints id = Ints{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<int32_t>(block * kBlock);
        for (size_t i = 0; i < kBlock; i += kLanes, id += static_cast<int32_t>(kLanes)) {
            const Floats weight = load(w + i);
            const Ints kept = (weight > cut.weight) | ((weight == cut.weight) & (id <= cut.id));
            mass += kept ? weight : Floats{};
        }
        weights.block_mass[block] = total(mass);
        sum += widen(mass);
    }
    return total(sum);
}

const bool kHasAvx2 = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
}();

#define CASTIRON_AVX2 __attribute__((target("avx2")))
CASTIRON_AVX2 Scan scan_avx2(std::span<const float> row, std::span<float> block_max) {
    return scan_body(row, block_max);
}
CASTIRON_AVX2 double weigh_avx2(std::span<const float> row, float max, float scale, const Weights& weights) {
    return weigh_body(row, max, scale, weights);
}
CASTIRON_AVX2 double sum_exp_avx2(std::span<const float> row, float max) {
    return sum_exp_body(row, max);
}
CASTIRON_AVX2 Mass mass_from_avx2(const Weights& weights, float threshold) {
    return mass_from_body(weights, threshold);
}
CASTIRON_AVX2 double kept_mass_avx2(const Weights& weights, Cut cut) {
    return kept_mass_body(weights, cut);
}

}  // namespace

Scan scan(std::span<const float> row, std::span<float> block_max) {
    return kHasAvx2 ? scan_avx2(row, block_max) : scan_body(row, block_max);
}

double weigh(std::span<const float> row, float max, float scale, const Weights& weights) {
    return kHasAvx2 ? weigh_avx2(row, max, scale, weights) : weigh_body(row, max, scale, weights);
}

double sum_exp(std::span<const float> row, float max) {
    return kHasAvx2 ? sum_exp_avx2(row, max) : sum_exp_body(row, max);
}

Mass mass_from(const Weights& weights, float threshold) {
    return kHasAvx2 ? mass_from_avx2(weights, threshold) : mass_from_body(weights, threshold);
}

double kept_mass(const Weights& weights, Cut cut) {
    return kHasAvx2 ? kept_mass_avx2(weights, cut) : kept_mass_body(weights, cut);
}

int32_t first_position(std::span<const float> row, std::span<const float> block_max, float max) {
    for (size_t block = 0; block < block_max.size(); ++block) {
        if (block_max[block] != max) continue;
        for (size_t i = block * kBlock; i < row.size(); ++i) {
            if (row[i] == max) return static_cast<int32_t>(i);
        }
    }
    return -1;
}

}  // namespace castiron::row_math
