#include "sampling/row_math.h"

#include <algorithm>
#include <cstring>
#include <limits>

// GCC's and Clang's vector types rather than intrinsics: the same source serves any width.
namespace castiron::row_math {
namespace {

using Floats = float __attribute__((vector_size(32)));
using Ints = int32_t __attribute__((vector_size(32)));
constexpr size_t kLanes = 8;
static_assert(kBlock % (2 * kLanes) == 0);

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

Floats broadcast(float value) { return Floats{} + value; }

Floats larger(Floats a, Floats b) { return a > b ? a : b; }

float largest(Floats v) {
    float best = v[0];
    for (size_t lane = 1; lane < kLanes; ++lane) best = v[lane] > best ? v[lane] : best;
    return best;
}

float total(Floats v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

// exp(x) for x <= 0, within 2 ulp; 0 below -87, where float32 ends.
Floats exp_nonpositive(Floats x) {
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

// Calls visit(first element, pointer to kBlock floats) for each block; the last one is filled up with `filler`.
template <typename Visit>
inline void for_each_block(std::span<const float> row, float filler, Visit visit) {
    size_t begin = 0;
    for (; begin + kBlock <= row.size(); begin += kBlock) visit(begin, row.data() + begin);
    if (begin == row.size()) return;
    float padded[kBlock];
    for (size_t i = 0; i < kBlock; ++i) padded[i] = begin + i < row.size() ? row[begin + i] : filler;
    visit(begin, padded);
}

}  // namespace

Scan scan(std::span<const float> row, std::span<float> block_max) {
    Floats best = broadcast(-kInfinity);
    Ints nan{};
    for_each_block(row, -kInfinity, [&](size_t begin, const float* x) {
        Floats here = broadcast(-kInfinity);
        for (size_t i = 0; i < kBlock; i += kLanes) {
            const Floats value = load(x + i);
            nan |= value != value;
            here = larger(value, here);
        }
        best = larger(here, best);
        block_max[begin / kBlock] = largest(here);
    });
    bool has_nan = false;
    for (size_t lane = 0; lane < kLanes; ++lane) has_nan |= nan[lane] != 0;
    return {largest(best), has_nan};
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

double weigh(std::span<const float> row, float max, float scale, std::span<float> weights,
             std::span<float> block_mass) {
    double sum = 0;
    for_each_block(row, -kInfinity, [&](size_t begin, const float* x) {
        float block[kBlock];
        Floats mass{};
        for (size_t i = 0; i < kBlock; i += kLanes) {
            const Floats weight = exp_nonpositive((load(x + i) - max) * scale);
            store(block + i, weight);
            mass += weight;
        }
        std::memcpy(weights.data() + begin, block, std::min(kBlock, row.size() - begin) * sizeof(float));
        block_mass[begin / kBlock] = total(mass);
        sum += static_cast<double>(block_mass[begin / kBlock]);
    });
    return sum;
}

double sum_exp(std::span<const float> row, float max) {
    double sum = 0;
    for_each_block(row, -kInfinity, [&](size_t, const float* x) {
        Floats mass{};
        for (size_t i = 0; i < kBlock; i += kLanes) mass += exp_nonpositive(load(x + i) - max);
        sum += static_cast<double>(total(mass));
    });
    return sum;
}

Mass mass_from(std::span<const float> weights, float threshold) {
    Mass result{0, 0};
    for_each_block(weights, -kInfinity, [&](size_t, const float* w) {
        Floats mass{};
        Ints count{};
        for (size_t i = 0; i < kBlock; i += kLanes) {
            const Floats weight = load(w + i);
            const Ints in = weight >= threshold;
            mass += in ? weight : Floats{};
            count -= in;
        }
        result.sum += static_cast<double>(total(mass));
        for (size_t lane = 0; lane < kLanes; ++lane) result.count += count[lane];
    });
    return result;
}

double kept_mass(std::span<const float> weights, Cut cut, std::span<float> block_mass) {
    double sum = 0;
    for_each_block(weights, 0.0F, [&](size_t begin, const float* w) {
        Floats mass{};
        Ints id = Ints{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<int32_t>(begin);
        for (size_t i = 0; i < kBlock; i += kLanes, id += static_cast<int32_t>(kLanes)) {
            const Floats weight = load(w + i);
            const Ints kept = (weight > cut.weight) | ((weight == cut.weight) & (id <= cut.id));
            mass += kept ? weight : Floats{};
        }
        block_mass[begin / kBlock] = total(mass);
        sum += static_cast<double>(block_mass[begin / kBlock]);
    });
    return sum;
}

}  // namespace castiron::row_math
