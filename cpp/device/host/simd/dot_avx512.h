// Products of codes on AVX-512, by VNNI where the compiler may use it: sums over four inputs side by side for
// each of sixteen outputs, exact. Included behind simd/avx512.h.

// Four codes of a row of activations, for all outputs.
struct Quad {
    __m512i v;
};
CASTIRON_INLINE Quad load_quad(const std::byte* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return {_mm512_set1_epi32(four)};
}

// Not as intrinsics: see simd/dot_avx2.h.
CASTIRON_INLINE void add_words(__m512i& sum, __m512i v) {
    __asm__("vpaddw %1, %0, %0" : "+v"(sum) : "v"(v));
}
CASTIRON_INLINE void add_ints(__m512i& sum, __m512i v) {
    __asm__("vpaddd %1, %0, %0" : "+v"(sum) : "v"(v));
}

// Where sums start (Rounding): the same for all outputs.
CASTIRON_INLINE Ints load_start(const std::byte* p) {
    return {load_quad(p).v};
}

#ifdef __AVX512VNNI__
inline constexpr int32_t kInt8Zero = 128;
inline constexpr bool kPairedSums = false;
#else
inline constexpr int32_t kInt8Zero = 0;
inline constexpr bool kPairedSums = true;
#endif
// Rows at once: with two panels 16 sums, more than latency times throughput asks for.
inline constexpr int kInt8Rows = 8, kNibbleRows = 8, kInt8Panels = 4;
// Panels at once for `rows` rows.
inline constexpr int dot_panels(int rows) {
    return rows <= 2 ? 4 : 2;
}

// Weights are unsigned; activations within ±127.
struct UnsignedDot {
    using Weights = Ints;
#ifdef __AVX512VNNI__
    CASTIRON_INLINE void add_to(Ints& s, Weights w, Quad x) { s.v = _mm512_dpbusd_epi32(s.v, w.v, x.v); }
    CASTIRON_INLINE Ints widen(Ints s) { return s; }
#else
    // Sums of pairs in int16. What comes in between may wrap around: the sum of a chunk fits.
    CASTIRON_INLINE void add_to(Ints& s, Weights w, Quad x) {
        add_words(s.v, _mm512_maddubs_epi16(w.v, x.v));
    }
    CASTIRON_INLINE Ints widen(Ints s) { return {_mm512_madd_epi16(s.v, _mm512_set1_epi16(1))}; }
#endif
};

#ifdef __AVX512VNNI__
struct Int8Dot : UnsignedDot {
    CASTIRON_INLINE Weights load(const std::byte* p) {
        return {_mm512_xor_si512(load_ints(p).v, _mm512_set1_epi8(static_cast<char>(0x80)))};
    }
};
#else
// |w| * (sign of w) x: a pair of products is at most 2 * 128 * 127, within int16.
struct Int8Dot {
    struct Weights {
        Ints magnitudes;
        __mmask64 negative;
    };
    CASTIRON_INLINE Weights load(const std::byte* p) {
        const __m512i w = load_ints(p).v;
        return {{_mm512_abs_epi8(w)}, _mm512_movepi8_mask(w)};
    }
    CASTIRON_INLINE void add_to(Ints& s, const Weights& w, Quad x) {
        const __m512i turned = _mm512_mask_sub_epi8(x.v, w.negative, _mm512_setzero_si512(), x.v);
        const __m512i pairs = _mm512_maddubs_epi16(w.magnitudes.v, turned);
        add_ints(s.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
    CASTIRON_INLINE Ints widen(Ints s) { return s; }
};
#endif
