// Sixteen float lanes as two AVX2 registers. Included inside the ISA's namespace: no guard, no includes.
//
// All instruction sets offer the same sixteen lanes and the same order of every sum, so that their results
// are equal bit for bit; a kernel tested in one is tested in the others but for this file.

#define CASTIRON_INLINE static inline __attribute__((always_inline))

struct Vec {
    __m256 lo, hi;
};
struct Mask {
    __m256 lo, hi;
};

inline constexpr int kLanes = 16;
// The largest microkernel whose accumulators stay in registers: rows x vectors (12 of 16 registers).
inline constexpr int kTileRows = 6;
inline constexpr int kTileVecs = 1;
// Over bf16 pairs the halves of a pair and a mask need registers too: six rows spill an accumulator (62
// GFLOP/s on one Zen 3 core), four reach 92 and their eight accumulators still cover the latency.
inline constexpr int kPairTileRows = 4;
// Vectors at once for a tile of `rows` rows.
inline constexpr int vecs_for(int rows) {
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}
// The same over cached keys or values, which are taken one vector at a time.
inline constexpr int attention_vecs(int rows) {
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

alignas(64) static const int kTailMask[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                              0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0};

CASTIRON_INLINE __m256i tail_mask(int n) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kTailMask + 16 - n));
}
CASTIRON_INLINE __m256i tail_mask_high(int n) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kTailMask + 24 - n));
}

CASTIRON_INLINE Vec zero() {
    return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
CASTIRON_INLINE Vec set1(float x) {
    const __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
CASTIRON_INLINE Vec lane_index() {
    return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}
CASTIRON_INLINE Vec load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
CASTIRON_INLINE void store(float* p, Vec v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}
// The first n lanes (0 <= n <= 16); the others read as zero, and memory behind them is not touched.
CASTIRON_INLINE Vec load_n(const float* p, int n) {
    if (n >= 16) return load(p);
    return {_mm256_maskload_ps(p, tail_mask(n)),
            n > 8 ? _mm256_maskload_ps(p + 8, tail_mask_high(n)) : _mm256_setzero_ps()};
}
CASTIRON_INLINE void store_n(float* p, Vec v, int n) {
    if (n >= 16) return store(p, v);
    _mm256_maskstore_ps(p, tail_mask(n), v.lo);
    if (n > 8) _mm256_maskstore_ps(p + 8, tail_mask_high(n), v.hi);
}

CASTIRON_INLINE __m256 widen_bf16(__m128i h) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
CASTIRON_INLINE Vec load_bf16(const uint16_t* p) {
    return {widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Sixteen pairs of bf16: the first and the second of each.
CASTIRON_INLINE Vec load_pair_even(const uint16_t* p) {
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
CASTIRON_INLINE Vec load_pair_odd(const uint16_t* p) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
    return {_mm256_castsi256_ps(_mm256_and_si256(lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(hi, mask))};
}

CASTIRON_INLINE Vec add(Vec a, Vec b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
CASTIRON_INLINE Vec sub(Vec a, Vec b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
CASTIRON_INLINE Vec mul(Vec a, Vec b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
CASTIRON_INLINE Vec div(Vec a, Vec b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
// a * b + c and c - a * b, rounded once.
CASTIRON_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
CASTIRON_INLINE Vec fnma(Vec a, Vec b, Vec c) {
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
// Where an operand is not a number the second one is returned.
CASTIRON_INLINE Vec min(Vec a, Vec b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
CASTIRON_INLINE Vec max(Vec a, Vec b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
CASTIRON_INLINE Vec sqrt(Vec a) {
    return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)};
}
CASTIRON_INLINE Vec round(Vec a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
CASTIRON_INLINE Vec abs(Vec a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
CASTIRON_INLINE Vec neg(Vec a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(sign, a.lo), _mm256_xor_ps(sign, a.hi)};
}
// |magnitude| with the sign of `sign`.
CASTIRON_INLINE Vec copysign(Vec magnitude, Vec sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_andnot_ps(bit, magnitude.lo), _mm256_and_ps(bit, sign.lo)),
            _mm256_or_ps(_mm256_andnot_ps(bit, magnitude.hi), _mm256_and_ps(bit, sign.hi))};
}
// 2^n for integral n in [-126, 127].
CASTIRON_INLINE Vec pow2(Vec n) {
    const __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.lo), bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.hi), bias), 23))};
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
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
CASTIRON_INLINE Vec select(Mask m, Vec if_set, Vec if_clear) {
    return {_mm256_blendv_ps(if_clear.lo, if_set.lo, m.lo), _mm256_blendv_ps(if_clear.hi, if_set.hi, m.hi)};
}
// Lane i with lane i+8, then i+4, i+2, i+1: the order every instruction set keeps.
CASTIRON_INLINE float sum(Vec v) {
    const __m256 eight = _mm256_add_ps(v.lo, v.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
CASTIRON_INLINE float largest(Vec v) {
    const __m256 eight = _mm256_max_ps(v.lo, v.hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
// Not as the intrinsic: for that gcc 12 spills every accumulator of a loop.
CASTIRON_INLINE void prefetch(const void* p) {
    __asm__ volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(p)));
}
CASTIRON_INLINE void prefetch_to_write(const void* p) {
    __asm__ volatile("prefetchw %0" ::"m"(*static_cast<const char*>(p)));
}

// Sixteen int32 lanes.
struct Ints {
    __m256i lo, hi;
};

CASTIRON_INLINE Ints zero_ints() {
    return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
CASTIRON_INLINE Ints set1_int(int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    return {v, v};
}
CASTIRON_INLINE Ints load_ints(const void* p) {
    const auto* at = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
// 32 bytes of nibbles as 64 bytes: first the low ones, then the high ones.
CASTIRON_INLINE Ints load_nibbles(const void* p) {
    const __m256i b = _mm256_loadu_si256(static_cast<const __m256i*>(p)), mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(b, mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
}
CASTIRON_INLINE void store_ints(void* p, Ints v) {
    auto* at = static_cast<__m256i*>(p);
    _mm256_storeu_si256(at, v.lo);
    _mm256_storeu_si256(at + 1, v.hi);
}
CASTIRON_INLINE Ints add(Ints a, Ints b) {
    return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
CASTIRON_INLINE Ints bit_and(Ints a, Ints b) {
    return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
CASTIRON_INLINE Ints bit_or(Ints a, Ints b) {
    return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
template <int kBits>
CASTIRON_INLINE Ints shift_left(Ints v) {
    return {_mm256_slli_epi32(v.lo, kBits), _mm256_slli_epi32(v.hi, kBits)};
}
template <int kBits>
CASTIRON_INLINE Ints shift_right(Ints v) {
    return {_mm256_srli_epi32(v.lo, kBits), _mm256_srli_epi32(v.hi, kBits)};
}
template <int kBits>
CASTIRON_INLINE Ints shift_right_signed(Ints v) {
    return {_mm256_srai_epi32(v.lo, kBits), _mm256_srai_epi32(v.hi, kBits)};
}
// Ones where equal.
CASTIRON_INLINE Ints equal(Ints a, Ints b) {
    return {_mm256_cmpeq_epi32(a.lo, b.lo), _mm256_cmpeq_epi32(a.hi, b.hi)};
}
// table[byte & 15] for each byte below 128.
CASTIRON_INLINE Ints look_up_bytes(const int8_t (&table)[16], Ints v) {
    const __m256i t =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(&table[0])));
    return {_mm256_shuffle_epi8(t, v.lo), _mm256_shuffle_epi8(t, v.hi)};
}
// The number, rounded to nearest even; the same bits.
CASTIRON_INLINE Vec to_float(Ints v) {
    return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)};
}
CASTIRON_INLINE Vec as_float(Ints v) {
    return {_mm256_castsi256_ps(v.lo), _mm256_castsi256_ps(v.hi)};
}
CASTIRON_INLINE Ints as_ints(Vec v) {
    return {_mm256_castps_si256(v.lo), _mm256_castps_si256(v.hi)};
}
// Sixteen int8 or uint8 as int32.
CASTIRON_INLINE Ints load_int8(const void* p) {
    const auto* at = static_cast<const __m128i*>(p);
    const __m128i b = _mm_loadu_si128(at);
    return {_mm256_cvtepi8_epi32(b), _mm256_cvtepi8_epi32(_mm_srli_si128(b, 8))};
}
CASTIRON_INLINE Ints load_uint8(const void* p) {
    const auto* at = static_cast<const __m128i*>(p);
    const __m128i b = _mm_loadu_si128(at);
    return {_mm256_cvtepu8_epi32(b), _mm256_cvtepu8_epi32(_mm_srli_si128(b, 8))};
}
// Integral floats in [-128, 127] as int8.
CASTIRON_INLINE void store_int8(int8_t* p, Vec v) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
CASTIRON_INLINE Vec load_f16(const uint16_t* p) {
    const auto* at = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
