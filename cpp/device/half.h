// Numbers in half precision as their bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace castiron {

// To nearest, ties to even; not-a-number stays one. Without a branch, for compilers to take many at once.
[[nodiscard]] inline uint16_t to_bf16(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u), kept = bits | 0x400000u;
    return static_cast<uint16_t>(((bits & 0x7fffffffu) > 0x7f800000u ? kept : rounded) >> 16);
}

// The same for IEEE half precision; what it cannot hold becomes infinity.
[[nodiscard]] inline uint16_t to_f16(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const float magnitude = std::abs(value);
    if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x1p-14f)
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::lrint(magnitude * 0x1p24f)));
    auto rounded = std::bit_cast<uint32_t>(magnitude);
    rounded += 0xfffu + (rounded >> 13 & 1u);
    return static_cast<uint16_t>(sign |
                                 ((rounded >> 13) - (112u << 10)));  // a float's exponents are 112 more
}

}  // namespace castiron
