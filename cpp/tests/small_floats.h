// Floats of eight and four bits, and rounding to them, as slowly and plainly as can be: what tests compare
// with.
#pragma once

#include <array>
#include <cmath>

namespace castiron::test {

// The formats' values, from their definitions (OCP 8-bit and Microscaling formats).
inline double e4m3_value(int bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa / 8.0, -6) : std::ldexp(1 + mantissa / 8.0, exponent - 7);
    return (bits & 0x80) != 0 ? -magnitude : magnitude;
}
inline double e2m1_value(int bits) {
    static constexpr std::array<double, 8> kValues = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return (bits & 8) != 0 ? -kValues[static_cast<size_t>(bits & 7)] : kValues[static_cast<size_t>(bits & 7)];
}

// The nearest of a format's values by looking at all of them; of two as near the one with the even code.
template <typename Value>
double nearest(double x, int codes, Value value) {
    int best = 0;
    for (int code = 1; code < codes; ++code) {
        const double here = std::abs(std::abs(x) - value(code)), there = std::abs(std::abs(x) - value(best));
        if (here < there || (here == there && code % 2 == 0)) best = code;
    }
    return x < 0 ? -value(best) : value(best);
}
inline double to_e4m3(double x) {
    return nearest(x, 0x7f, e4m3_value);
}
inline double to_e2m1(double x) {
    return nearest(x, 8, e2m1_value);
}

}  // namespace castiron::test
