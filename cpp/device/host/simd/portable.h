// Sixteen float lanes in plain C++: slow, runs anywhere, and the model that simd/avx2.h and simd/avx512.h are
// tested against. Tile sizes are those of AVX-512, so that its blocking runs in tests on machines without it.
// Included inside the ISA's namespace: no guard, no includes.

#define CASTIRON_INLINE static inline

struct Vec {
    float v[16];
};
struct Mask {
    bool m[16];
};

inline constexpr int kLanes = 16;
inline constexpr int kTileRows = 12;
inline constexpr int kTileVecs = 2;
inline constexpr int kPairTileRows = 12;
// Vectors at once for a tile of `rows` rows.
inline constexpr int vecs_for(int rows) {
    return rows <= 2 ? 8 : rows <= 4 ? 24 / rows - 1 : rows <= 6 ? 4 : rows <= 8 ? 3 : 2;
}
// The same over cached keys or values, which are taken one vector at a time.
inline constexpr int attention_vecs(int rows) {
    return rows <= 6 ? 4 : 2;
}

template <typename F>
CASTIRON_INLINE Vec each(F f) {
    Vec r;
    for (int i = 0; i < 16; ++i) r.v[i] = f(i);
    return r;
}
CASTIRON_INLINE float from_bits(uint32_t bits) {
    return __builtin_bit_cast(float, bits);
}

CASTIRON_INLINE Vec zero() {
    return each([](int) { return 0.0f; });
}
CASTIRON_INLINE Vec set1(float x) {
    return each([=](int) { return x; });
}
CASTIRON_INLINE Vec lane_index() {
    return each([](int i) { return static_cast<float>(i); });
}
CASTIRON_INLINE Vec load(const float* p) {
    return each([=](int i) { return p[i]; });
}
CASTIRON_INLINE void store(float* p, Vec v) {
    for (int i = 0; i < 16; ++i) p[i] = v.v[i];
}
CASTIRON_INLINE Vec load_n(const float* p, int n) {
    return each([=](int i) { return i < n ? p[i] : 0.0f; });
}
CASTIRON_INLINE void store_n(float* p, Vec v, int n) {
    for (int i = 0; i < n && i < 16; ++i) p[i] = v.v[i];
}
CASTIRON_INLINE Vec load_bf16(const uint16_t* p) {
    return each([=](int i) { return from_bits(static_cast<uint32_t>(p[i]) << 16); });
}
CASTIRON_INLINE Vec load_pair_even(const uint16_t* p) {
    return each([=](int i) { return from_bits(static_cast<uint32_t>(p[2 * i]) << 16); });
}
CASTIRON_INLINE Vec load_pair_odd(const uint16_t* p) {
    return each([=](int i) { return from_bits(static_cast<uint32_t>(p[2 * i + 1]) << 16); });
}
CASTIRON_INLINE Vec add(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
CASTIRON_INLINE Vec sub(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
CASTIRON_INLINE Vec mul(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
CASTIRON_INLINE Vec div(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
CASTIRON_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
CASTIRON_INLINE Vec fnma(Vec a, Vec b, Vec c) {
    return each([&](int i) { return __builtin_fmaf(-a.v[i], b.v[i], c.v[i]); });
}
CASTIRON_INLINE Vec min(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
CASTIRON_INLINE Vec max(Vec a, Vec b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
CASTIRON_INLINE Vec sqrt(Vec a) {
    return each([&](int i) { return __builtin_sqrtf(a.v[i]); });
}
CASTIRON_INLINE Vec round(Vec a) {
    return each([&](int i) { return __builtin_rintf(a.v[i]); });
}
CASTIRON_INLINE Vec abs(Vec a) {
    return each([&](int i) { return __builtin_fabsf(a.v[i]); });
}
CASTIRON_INLINE Vec neg(Vec a) {
    return each([&](int i) { return -a.v[i]; });
}
CASTIRON_INLINE Vec copysign(Vec magnitude, Vec sign) {
    return each([&](int i) { return __builtin_copysignf(magnitude.v[i], sign.v[i]); });
}
// The vector units turn what no int can hold into INT_MIN.
CASTIRON_INLINE Vec pow2(Vec n) {
    return each([&](int i) {
        const float f = n.v[i];
        const uint32_t whole = f >= -2147483648.0f && f < 2147483648.0f
                                   ? static_cast<uint32_t>(static_cast<int>(f))
                                   : 0x80000000u;
        return from_bits((whole + 127u) << 23);
    });
}
// p · 2^n, rounded once where it is subnormal: in two steps, because 2^n alone leaves the range at both ends.
CASTIRON_INLINE Vec scale_by_pow2(Vec p, Vec n) {
    const Vec half = round(mul(n, set1(0.5f)));
    return mul(mul(p, pow2(half)), pow2(sub(n, half)));
}
// The same for results that are normal numbers.
CASTIRON_INLINE Vec scale_to_normal(Vec p, Vec n) {
    return mul(p, pow2(n));
}
CASTIRON_INLINE Mask less(Vec a, Vec b) {
    Mask r;
    for (int i = 0; i < 16; ++i) r.m[i] = a.v[i] < b.v[i];
    return r;
}
CASTIRON_INLINE Vec select(const Mask& m, Vec if_set, Vec if_clear) {
    return each([&](int i) { return m.m[i] ? if_set.v[i] : if_clear.v[i]; });
}
CASTIRON_INLINE float sum(Vec v) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) v.v[i] = v.v[i] + v.v[i + half];
    }
    return v.v[0];
}
CASTIRON_INLINE float largest(Vec v) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) v.v[i] = v.v[i] > v.v[i + half] ? v.v[i] : v.v[i + half];
    }
    return v.v[0];
}
CASTIRON_INLINE void prefetch(const void*) {}
CASTIRON_INLINE void prefetch_to_write(const void*) {}

// Sixteen int32 lanes.
struct Ints {
    int32_t v[16];
};

template <typename F>
CASTIRON_INLINE Ints each_int(F f) {
    Ints r;
    for (int i = 0; i < 16; ++i) r.v[i] = static_cast<int32_t>(f(i));
    return r;
}
CASTIRON_INLINE Ints zero_ints() {
    return each_int([](int) { return 0; });
}
CASTIRON_INLINE Ints set1_int(int32_t x) {
    return each_int([=](int) { return x; });
}
CASTIRON_INLINE Ints load_ints(const void* p) {
    Ints r;
    __builtin_memcpy(r.v, p, 64);
    return r;
}
// 32 bytes of nibbles as 64 bytes: first the low ones, then the high ones.
CASTIRON_INLINE Ints load_nibbles(const void* p) {
    uint8_t bytes[64];
    for (int i = 0; i < 32; ++i) {
        const uint8_t b = static_cast<const uint8_t*>(p)[i];
        bytes[i] = b & 15;
        bytes[32 + i] = b >> 4;
    }
    return load_ints(bytes);
}
CASTIRON_INLINE void store_ints(void* p, Ints v) {
    __builtin_memcpy(p, v.v, 64);
}
CASTIRON_INLINE Ints add(Ints a, Ints b) {
    return each_int([&](int i) { return static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]); });
}
CASTIRON_INLINE Ints bit_and(Ints a, Ints b) {
    return each_int([&](int i) { return a.v[i] & b.v[i]; });
}
CASTIRON_INLINE Ints bit_or(Ints a, Ints b) {
    return each_int([&](int i) { return a.v[i] | b.v[i]; });
}
template <int kBits>
CASTIRON_INLINE Ints shift_left(Ints v) {
    return each_int([&](int i) { return static_cast<uint32_t>(v.v[i]) << kBits; });
}
template <int kBits>
CASTIRON_INLINE Ints shift_right(Ints v) {
    return each_int([&](int i) { return static_cast<uint32_t>(v.v[i]) >> kBits; });
}
template <int kBits>
CASTIRON_INLINE Ints shift_right_signed(Ints v) {
    return each_int([&](int i) { return v.v[i] >> kBits; });
}
// Ones where equal.
CASTIRON_INLINE Ints equal(Ints a, Ints b) {
    return each_int([&](int i) { return a.v[i] == b.v[i] ? -1 : 0; });
}
// table[byte & 15] for each byte below 128.
CASTIRON_INLINE Ints look_up_bytes(const int8_t (&table)[16], Ints v) {
    int8_t bytes[64];
    __builtin_memcpy(bytes, v.v, 64);
    for (int8_t& b : bytes) b = table[b & 15];
    return load_ints(bytes);
}
// The number, rounded to nearest even; the same bits.
CASTIRON_INLINE Vec to_float(Ints v) {
    return each([&](int i) { return static_cast<float>(v.v[i]); });
}
CASTIRON_INLINE Vec as_float(Ints v) {
    return each([&](int i) { return from_bits(static_cast<uint32_t>(v.v[i])); });
}
CASTIRON_INLINE Ints as_ints(Vec v) {
    return each_int([&](int i) { return __builtin_bit_cast(int32_t, v.v[i]); });
}
// Sixteen int8 or uint8 as int32.
CASTIRON_INLINE Ints load_int8(const void* p) {
    return each_int([=](int i) { return static_cast<const int8_t*>(p)[i]; });
}
CASTIRON_INLINE Ints load_uint8(const void* p) {
    return each_int([=](int i) { return static_cast<const uint8_t*>(p)[i]; });
}
// Integral floats in [-128, 127] as int8.
CASTIRON_INLINE void store_int8(int8_t* p, Vec v) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(v.v[i]);
}
CASTIRON_INLINE float from_half(uint16_t h) {
    // Exponents of half are 112 less; scaling by a power of two is exact, subnormal numbers included.
    const uint32_t magnitude = h & 0x7fffu, sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    return from_bits(__builtin_bit_cast(uint32_t, from_bits(magnitude << 13) * 0x1p112f) | sign);
}
CASTIRON_INLINE Vec load_f16(const uint16_t* p) {
    return each([=](int i) { return from_half(p[i]); });
}
