// Products of codes on AVX2, and on AVX-VNNI where the compiler may use it: sums over four inputs side by
// side for each of sixteen outputs, exact. Included behind simd/avx2.h.

// Four codes of a row of activations, for all outputs.
struct Quad {
    __m256i v;
};
CASTIRON_INLINE Quad load_quad(const std::byte* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return {_mm256_set1_epi32(four)};
}

// Rows at once: their sums, weights and what is in between stay in sixteen registers.
inline constexpr int kDotPanels = 1;
#ifdef __AVXVNNI__
inline constexpr int kInt8Rows = 6, kNibbleRows = 6;
#else
inline constexpr int kInt8Rows = 4, kNibbleRows = 6;
#endif

// Weights are unsigned, at most kLargest; activations within ±127.
template <int kLargest>
struct UnsignedDot {
    using Weights = Ints;
    using Sums = Ints;
#ifdef __AVXVNNI__
    static constexpr int kMaxQuads = 1 << 30;
    CASTIRON_INLINE void add_to(Sums& s, Weights w, Quad x) {
        s.lo = _mm256_dpbusd_avx_epi32(s.lo, w.lo, x.v);
        s.hi = _mm256_dpbusd_avx_epi32(s.hi, w.hi, x.v);
    }
    CASTIRON_INLINE Ints widen(Sums s) { return s; }
#else
    // Quads whose sums of pairs fit into int16.
    static constexpr int kMaxQuads = 32767 / (kLargest * 127 * 2);
    CASTIRON_INLINE void add_to(Sums& s, Weights w, Quad x) {
        s.lo = _mm256_add_epi16(s.lo, _mm256_maddubs_epi16(w.lo, x.v));
        s.hi = _mm256_add_epi16(s.hi, _mm256_maddubs_epi16(w.hi, x.v));
    }
    CASTIRON_INLINE Ints widen(Sums s) {
        const __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(s.lo, ones), _mm256_madd_epi16(s.hi, ones)};
    }
#endif
};

#ifdef __AVXVNNI__
inline constexpr int32_t kInt8Zero = 128;
struct Int8Dot : UnsignedDot<255> {
    CASTIRON_INLINE Weights load(const std::byte* p) {
        const __m256i zero = _mm256_set1_epi8(static_cast<char>(0x80));
        const Ints w = load_ints(p);
        return {_mm256_xor_si256(w.lo, zero), _mm256_xor_si256(w.hi, zero)};
    }
};
#else
inline constexpr int32_t kInt8Zero = 0;
// |w| * (sign of w) x: a pair of products is at most 2 * 128 * 127, within int16.
struct Int8Dot {
    struct Weights {
        Ints codes, magnitudes;
    };
    using Sums = Ints;
    static constexpr int kMaxQuads = 1 << 30;
    CASTIRON_INLINE Weights load(const std::byte* p) {
        const Ints w = load_ints(p);
        return {w, {_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)}};
    }
    CASTIRON_INLINE void add_to(Sums& s, const Weights& w, Quad x) {
        const __m256i ones = _mm256_set1_epi16(1);
        const auto four = [&](__m256i codes, __m256i magnitudes) {
            return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x.v, codes)), ones);
        };
        s.lo = _mm256_add_epi32(s.lo, four(w.codes.lo, w.magnitudes.lo));
        s.hi = _mm256_add_epi32(s.hi, four(w.codes.hi, w.magnitudes.hi));
    }
    CASTIRON_INLINE Ints widen(Sums s) { return s; }
};
#endif
