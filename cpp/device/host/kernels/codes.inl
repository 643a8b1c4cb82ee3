// Numbers of few bits as floats.

// float8 e4m3fn in the low byte of each lane. Its exponents are 120 less than a float's; scaling by a power
// of two is exact, subnormal numbers included. 0x7f and 0xff are not numbers.
CASTIRON_INLINE Vec from_e4m3(Ints code) {
    const Ints magnitude = bit_and(code, set1_int(0x7f));
    const Ints nan = equal(magnitude, set1_int(0x7f));
    const Vec value = mul(as_float(shift_left<20>(magnitude)), set1(0x1p120f));
    return as_float(bit_or(bit_or(as_ints(value), nan), shift_left<24>(bit_and(code, set1_int(0x80)))));
}

// Sixteen scales of a panel.
CASTIRON_INLINE Vec load_scale(const std::byte* p, bool half) {
    return half ? load_f16(reinterpret_cast<const uint16_t*>(p)) : load(reinterpret_cast<const float*>(p));
}
