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

// Not as intrinsics: gcc adds whole numbers in another order than written, and has no registers left for the
// sums then.
CASTIRON_INLINE void add_words(__m256i& sum, __m256i v) {
    __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(v));
}
CASTIRON_INLINE void add_ints(__m256i& sum, __m256i v) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(v));
}

// Where sums start (Rounding): the same for all outputs.
CASTIRON_INLINE Ints load_start(const std::byte* p) {
    const Quad start = load_quad(p);
    return {start.v, start.v};
}

// kInt8Panels: of a stream of int8, at most; what sums go through without VNNI takes the registers of two.
#ifdef __AVXVNNI__
inline constexpr int kInt8Rows = 6, kInt8Panels = 4;
inline constexpr int32_t kInt8Zero = 128;
inline constexpr bool kPairedSums = false;
#else
inline constexpr int kInt8Rows = 4, kInt8Panels = 2;
inline constexpr int32_t kInt8Zero = 0;
inline constexpr bool kPairedSums = true;
#endif
// Rows at once: their sums, weights and what is in between stay in sixteen registers.
inline constexpr int kNibbleRows = 6;
// Panels at once for `rows` rows.
inline constexpr int dot_panels(int rows) {
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

// Weights are unsigned; activations within ±127.
struct UnsignedDot {
    using Weights = Ints;
#ifdef __AVXVNNI__
    CASTIRON_INLINE void add_to(Ints& s, Weights w, Quad x) {
        s.lo = _mm256_dpbusd_avx_epi32(s.lo, w.lo, x.v);
        s.hi = _mm256_dpbusd_avx_epi32(s.hi, w.hi, x.v);
    }
    CASTIRON_INLINE Ints widen(Ints s) { return s; }
#else
    // Sums of pairs in int16. What comes in between may wrap around: the sum of a chunk fits.
    CASTIRON_INLINE void add_to(Ints& s, Weights w, Quad x) {
        add_words(s.lo, _mm256_maddubs_epi16(w.lo, x.v));
        add_words(s.hi, _mm256_maddubs_epi16(w.hi, x.v));
    }
    CASTIRON_INLINE Ints widen(Ints s) {
        const __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(s.lo, ones), _mm256_madd_epi16(s.hi, ones)};
    }
#endif
};

#ifdef __AVXVNNI__
struct Int8Dot : UnsignedDot {
    CASTIRON_INLINE Weights load(const std::byte* p) {
        const __m256i zero = _mm256_set1_epi8(static_cast<char>(0x80));
        const Ints w = load_ints(p);
        return {_mm256_xor_si256(w.lo, zero), _mm256_xor_si256(w.hi, zero)};
    }
};
#else
// |w| * (sign of w) x: a pair of products is at most 2 * 128 * 127, within int16.
struct Int8Dot {
    struct Weights {
        Ints codes, magnitudes;
    };
    CASTIRON_INLINE Weights load(const std::byte* p) {
        const Ints w = load_ints(p);
        return {w, {_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)}};
    }
    CASTIRON_INLINE void add_to(Ints& s, const Weights& w, Quad x) {
        const __m256i ones = _mm256_set1_epi16(1);
        const auto four = [&](__m256i codes, __m256i magnitudes) {
            return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x.v, codes)), ones);
        };
        add_ints(s.lo, four(w.codes.lo, w.magnitudes.lo));
        add_ints(s.hi, four(w.codes.hi, w.magnitudes.hi));
    }
    CASTIRON_INLINE Ints widen(Ints s) { return s; }
};
#endif
