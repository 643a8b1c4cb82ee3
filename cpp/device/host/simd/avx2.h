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
// The same at half the cost, but its lanes are elements 0 to 3, 8 to 11, 4 to 7, 12 to 15 until unmix.
CASTIRON_INLINE Vec load_bf16_mixed(const uint16_t* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), low = _mm256_setzero_si256();
    return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(low, h)),
            _mm256_castsi256_ps(_mm256_unpackhi_epi16(low, h))};
}
CASTIRON_INLINE Vec unmix(Vec v) {
    return {_mm256_permute2f128_ps(v.lo, v.hi, 0x20), _mm256_permute2f128_ps(v.lo, v.hi, 0x31)};
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
