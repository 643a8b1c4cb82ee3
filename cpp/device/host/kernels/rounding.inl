// Activations rounded to a format before a product (docs/program.md): as int8 codes that the integer product
// takes, or as floats that hold what is left of them.

// Nearest number of few mantissa bits, ties to even: adding 1.5 * 2^n rounds at the last bit wanted.
// kMantissa: bits behind the leading one; kMinExponent: of the smallest normal number.
template <int kMantissa, int kMinExponent>
CASTIRON_INLINE Vec round_to_bits(Vec x, float largest) {
    const Vec a = min(abs(x), set1(largest));
    const Vec power =
        max(as_float(bit_and(as_ints(a), set1_int(0x7f800000))), set1(__builtin_ldexpf(1.0f, kMinExponent)));
    const Vec magic = mul(power, set1(__builtin_ldexpf(1.5f, 23 - kMantissa)));
    return copysign(sub(add(a, magic), magic), x);
}
CASTIRON_INLINE Vec round_int8(Vec x) {
    return max(min(round(x), set1(127.0f)), set1(-127.0f));
}
CASTIRON_INLINE Vec round_e4m3(Vec x) {
    return round_to_bits<3, -6>(x, 448.0f);
}
CASTIRON_INLINE Vec round_e2m1(Vec x) {
    return round_to_bits<1, 0>(x, 6.0f);
}

CASTIRON_INLINE float first_lane(Vec v) {
    float lanes[16];
    store(lanes, v);
    return lanes[0];
}

CASTIRON_INLINE float largest_magnitude(const float* x, int64_t n) {
    Vec m = zero();
    for_each_vec(n, [&](int64_t i, int lanes) { m = max(m, abs(load_n(x + i, lanes))); });
    return largest(m);
}

// Quotients by one divisor. A division takes as long as a dozen multiplications; with the divisor's
// reciprocal rounded correctly, one step of refinement rounds the quotient correctly too (P. Markstein,
// "Computation of elementary functions on the IBM RISC System/6000 processor", 1990), as long as nothing
// leaves the range of normal numbers: quotients that small are zero in every format here.
class Divisor {
public:
    explicit Divisor(float by) : by_(set1(by)), reciprocal_(set1(1.0f / by)) {
        in_range_ = by > 0x1p-100f && by < 0x1p100f;
    }
    CASTIRON_INLINE Vec divide(const Divisor& d, Vec x) {
        if (!d.in_range_) return div(x, d.by_);
        const Vec q = mul(x, d.reciprocal_);
        return fma(fnma(q, d.by_, x), d.reciprocal_, q);
    }

private:
    Vec by_, reciprocal_;
    bool in_range_;
};

// Where the sums of a chunk start; total: sums of codes by their place among sixteen.
CASTIRON_INLINE int32_t chunk_start(const Rounding& a, Vec total) {
    if (!a.paired) return -a.zero * static_cast<int32_t>(sum(total));
    float totals[16];
    store(totals, total);
    float first = 0, last = 0;  // of each four inputs the first two and the last two
    for (int i = 0; i < 16; ++i) (i % 4 < 2 ? first : last) += totals[i];
    const int32_t pairs[2] = {-a.zero * static_cast<int32_t>(first), -a.zero * static_cast<int32_t>(last)};
    const auto low = static_cast<uint32_t>(pairs[0]) & 0xffffu;
    return static_cast<int32_t>(low | static_cast<uint32_t>(pairs[1]) << 16);
}

// Codes of one group of inputs, and what a row says of each step and chunk of it.
static void round_int8_group(const Rounding& a, const float* x, int64_t begin, int64_t end, float scale,
                             std::byte* row) {
    const Divisor divisor(scale > 0 ? scale : 1.0f);
    auto* codes = reinterpret_cast<int8_t*>(row);
    auto* scales = reinterpret_cast<float*>(row + a.scales_at());
    auto* sums = reinterpret_cast<float*>(row + a.sums_at());
    auto* starts = reinterpret_cast<int32_t*>(row + a.starts_at());
    const int64_t chunks = a.chunks_per_step();
    int64_t step = begin / a.step;
    for (int64_t at = begin; at < end; ++step) {
        const int64_t step_end = end - at < a.step ? end : at + a.step;
        Vec step_total = zero();  // of whole numbers below 2^24 in all: exact in any order
        for (int64_t chunk = 0; at < step_end; ++chunk) {
            const int64_t n = step_end - at < a.chunk ? step_end - at : a.chunk;
            Vec total = zero();
            for_each_vec(n, [&](int64_t i, int lanes) {
                const Vec code = round_int8(Divisor::divide(divisor, load_n(x + at + i, lanes)));
                total = add(total, code);
                if (lanes == 16) {
                    store_int8(codes + at + i, code);
                } else {
                    int8_t few[16];
                    store_int8(few, code);
                    __builtin_memcpy(codes + at + i, few, static_cast<size_t>(lanes));
                }
            });
            starts[step * chunks + chunk] = chunk_start(a, total);
            step_total = add(step_total, total);
            at += n;
        }
        scales[step] = scale * a.unit;
        sums[step] = scale * sum(step_total);
    }
}

// y = rounded(x / scale) * scale over one group.
template <typename F>
CASTIRON_INLINE void round_group(const float* x, float* y, int64_t n, float scale, F rounded) {
    const Vec s = set1(scale);
    const Divisor divisor(scale);
    for_each_vec(n, [&](int64_t i, int lanes) {
        store_n(y + i, mul(rounded(Divisor::divide(divisor, load_n(x + i, lanes))), s), lanes);
    });
}

// 2^(floor(log2 largest) - emax), as the MX formats share it.
CASTIRON_INLINE float mx_scale(float largest, int emax) {
    const auto exponent = static_cast<int>(__builtin_bit_cast(uint32_t, largest) >> 23) - 127 - emax;
    return __builtin_ldexpf(1.0f, exponent < -127 ? -127 : exponent);
}

static void round_row(const Rounding& a, const float* x, std::byte* row) {
    auto* y = reinterpret_cast<float*>(row);
    float over = a.scale;  // of nvfp4: the scale of scales
    if (a.format == XFormat::kInt8) {
        __builtin_memset(row + a.k / 4 * 4, 0, static_cast<size_t>(a.scales_at() - a.k / 4 * 4));
    } else if (a.format == XFormat::kNvfp4 && over == 0) {
        over = largest_magnitude(x, a.k) / 2688.0f;  // 448 * 6
        if (!(over > 0)) over = 1;
    }
    for (int64_t begin = 0; begin < a.k; begin += a.group) {
        const int64_t end = a.k - begin < a.group ? a.k : begin + a.group, n = end - begin;
        const auto amax = [&] { return largest_magnitude(x + begin, n); };
        const auto positive = [](float scale) { return scale > 0 ? scale : 1.0f; };
        switch (a.format) {
            case XFormat::kFloat:
                __builtin_memcpy(y + begin, x + begin, static_cast<size_t>(n) * 4);
                break;
            case XFormat::kInt8:
                round_int8_group(a, x, begin, end, a.scale > 0 ? a.scale : amax() / 127.0f, row);
                break;
            case XFormat::kInt8Floats:
                round_group(x + begin, y + begin, n, a.scale > 0 ? a.scale : positive(amax() / 127.0f),
                            [](Vec v) { return round_int8(v); });
                break;
            case XFormat::kFp8:
                round_group(x + begin, y + begin, n, a.scale > 0 ? a.scale : positive(amax() / 448.0f),
                            [](Vec v) { return round_e4m3(v); });
                break;
            case XFormat::kNvfp4: {
                const float scale = first_lane(round_e4m3(set1(amax() / 6.0f / over))) * over;
                if (scale > 0) {
                    round_group(x + begin, y + begin, n, scale, [](Vec v) { return round_e2m1(v); });
                } else {
                    __builtin_memset(y + begin, 0, static_cast<size_t>(n) * 4);
                }
                break;
            }
            case XFormat::kMxfp4:
                round_group(x + begin, y + begin, n, mx_scale(amax(), 2),
                            [](Vec v) { return round_e2m1(v); });
                break;
            case XFormat::kMxfp8:
                round_group(x + begin, y + begin, n, mx_scale(amax(), 8),
                            [](Vec v) { return round_e4m3(v); });
                break;
        }
    }
}
