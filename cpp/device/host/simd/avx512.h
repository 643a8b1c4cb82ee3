// Sixteen float lanes as one AVX-512 register. Included inside the ISA's namespace: no guard, no includes.
// The same sums in the same order as simd/avx2.h.

#define CASTIRON_INLINE static inline __attribute__((always_inline))

struct Vec {
    __m512 v;
};
struct Mask {
    __mmask16 m;
};

inline constexpr int kLanes = 16;
// Rows x vectors: 24 accumulators, 2 weights, 1 broadcast of 32 registers.
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

CASTIRON_INLINE __mmask16 first(int n) {
    return static_cast<__mmask16>((1u << n) - 1u);
}

CASTIRON_INLINE Vec zero() {
    return {_mm512_setzero_ps()};
}
CASTIRON_INLINE Vec set1(float x) {
    return {_mm512_set1_ps(x)};
}
CASTIRON_INLINE Vec lane_index() {
    return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
CASTIRON_INLINE Vec load(const float* p) {
    return {_mm512_loadu_ps(p)};
}
CASTIRON_INLINE void store(float* p, Vec v) {
    _mm512_storeu_ps(p, v.v);
}
CASTIRON_INLINE Vec load_n(const float* p, int n) {
    return {_mm512_maskz_loadu_ps(first(n), p)};
}
CASTIRON_INLINE void store_n(float* p, Vec v, int n) {
    _mm512_mask_storeu_ps(p, first(n), v.v);
}

CASTIRON_INLINE Vec load_bf16(const uint16_t* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
CASTIRON_INLINE Vec load_pair_even(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
CASTIRON_INLINE Vec load_pair_odd(const uint16_t* p) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), mask))};
}

CASTIRON_INLINE Vec add(Vec a, Vec b) {
    return {_mm512_add_ps(a.v, b.v)};
}
CASTIRON_INLINE Vec sub(Vec a, Vec b) {
    return {_mm512_sub_ps(a.v, b.v)};
}
CASTIRON_INLINE Vec mul(Vec a, Vec b) {
    return {_mm512_mul_ps(a.v, b.v)};
}
CASTIRON_INLINE Vec div(Vec a, Vec b) {
    return {_mm512_div_ps(a.v, b.v)};
}
CASTIRON_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
CASTIRON_INLINE Vec fnma(Vec a, Vec b, Vec c) {
    return {_mm512_fnmadd_ps(a.v, b.v, c.v)};
}
CASTIRON_INLINE Vec min(Vec a, Vec b) {
    return {_mm512_min_ps(a.v, b.v)};
}
CASTIRON_INLINE Vec max(Vec a, Vec b) {
    return {_mm512_max_ps(a.v, b.v)};
}
CASTIRON_INLINE Vec sqrt(Vec a) {
    return {_mm512_sqrt_ps(a.v)};
}
CASTIRON_INLINE Vec round(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
CASTIRON_INLINE Vec abs(Vec a) {
    return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)};
}
CASTIRON_INLINE Vec neg(Vec a) {
    return {_mm512_xor_ps(_mm512_set1_ps(-0.0f), a.v)};
}
CASTIRON_INLINE Vec copysign(Vec magnitude, Vec sign) {
    const __m512 bit = _mm512_set1_ps(-0.0f);
    return {_mm512_or_ps(_mm512_andnot_ps(bit, magnitude.v), _mm512_and_ps(bit, sign.v))};
}
// p · 2^n, rounded once where it is subnormal; the same for results that are normal numbers.
CASTIRON_INLINE Vec scale_by_pow2(Vec p, Vec n) {
    return {_mm512_scalef_ps(p.v, n.v)};
}
CASTIRON_INLINE Vec scale_to_normal(Vec p, Vec n) {
    return scale_by_pow2(p, n);
}
CASTIRON_INLINE Mask less(Vec a, Vec b) {
    return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)};
}
CASTIRON_INLINE Vec select(Mask m, Vec if_set, Vec if_clear) {
    return {_mm512_mask_blend_ps(m.m, if_clear.v, if_set.v)};
}
CASTIRON_INLINE float sum(Vec v) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
CASTIRON_INLINE float largest(Vec v) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
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

// Into the second-level cache.
CASTIRON_INLINE void prefetch_far(const void* p) {
    __asm__ volatile("prefetcht1 %0" ::"m"(*static_cast<const char*>(p)));
}

// Sixteen int32 lanes.
struct Ints {
    __m512i v;
};

CASTIRON_INLINE Ints zero_ints() {
    return {_mm512_setzero_si512()};
}
CASTIRON_INLINE Ints set1_int(int32_t x) {
    return {_mm512_set1_epi32(x)};
}
CASTIRON_INLINE Ints load_ints(const void* p) {
    return {_mm512_loadu_si512(p)};
}
// 32 bytes of nibbles as 64 bytes: first the low ones, then the high ones.
CASTIRON_INLINE Ints load_nibbles(const void* p) {
    const __m256i b = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(b), _mm256_srli_epi16(b, 4), 1);
    return {_mm512_and_si512(both, _mm512_set1_epi8(15))};
}
CASTIRON_INLINE void store_ints(void* p, Ints v) {
    _mm512_storeu_si512(p, v.v);
}
CASTIRON_INLINE Ints add(Ints a, Ints b) {
    return {_mm512_add_epi32(a.v, b.v)};
}
CASTIRON_INLINE Ints bit_and(Ints a, Ints b) {
    return {_mm512_and_si512(a.v, b.v)};
}
CASTIRON_INLINE Ints bit_or(Ints a, Ints b) {
    return {_mm512_or_si512(a.v, b.v)};
}
template <int kBits>
CASTIRON_INLINE Ints shift_left(Ints v) {
    return {_mm512_slli_epi32(v.v, kBits)};
}
template <int kBits>
CASTIRON_INLINE Ints shift_right(Ints v) {
    return {_mm512_srli_epi32(v.v, kBits)};
}
template <int kBits>
CASTIRON_INLINE Ints shift_right_signed(Ints v) {
    return {_mm512_srai_epi32(v.v, kBits)};
}
// Ones where equal.
CASTIRON_INLINE Ints equal(Ints a, Ints b) {
    return {_mm512_movm_epi32(_mm512_cmpeq_epi32_mask(a.v, b.v))};
}
// table[byte & 15] for each byte below 128.
CASTIRON_INLINE Ints look_up_bytes(const int8_t (&table)[16], Ints v) {
    const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(&table[0])));
    return {_mm512_shuffle_epi8(t, v.v)};
}
// The number, rounded to nearest even; the same bits.
CASTIRON_INLINE Vec to_float(Ints v) {
    return {_mm512_cvtepi32_ps(v.v)};
}
CASTIRON_INLINE Vec as_float(Ints v) {
    return {_mm512_castsi512_ps(v.v)};
}
CASTIRON_INLINE Ints as_ints(Vec v) {
    return {_mm512_castps_si512(v.v)};
}
// Sixteen int8 or uint8 as int32.
CASTIRON_INLINE Ints load_int8(const void* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
CASTIRON_INLINE Ints load_uint8(const void* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
// Integral floats in [-128, 127] as int8.
CASTIRON_INLINE void store_int8(int8_t* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v.v)));
}
CASTIRON_INLINE Vec load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
