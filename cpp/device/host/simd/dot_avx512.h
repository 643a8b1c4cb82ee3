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

// Rows and panels at once: 24 sums, two panels of weights, of 32 registers.
inline constexpr int kDotPanels = 2;
inline constexpr int kInt8Rows = 12, kNibbleRows = 12;

// Weights are unsigned, at most kLargest; activations within ±127.
template <int kLargest>
struct UnsignedDot {
    using Weights = Ints;
    using Sums = Ints;
#ifdef __AVX512VNNI__
    static constexpr int kMaxQuads = 1 << 30;
    CASTIRON_INLINE void add_to(Sums& s, Weights w, Quad x) { s.v = _mm512_dpbusd_epi32(s.v, w.v, x.v); }
    CASTIRON_INLINE Ints widen(Sums s) { return s; }
#else
    // Quads whose sums of pairs fit into int16.
    static constexpr int kMaxQuads = 32767 / (kLargest * 127 * 2);
    CASTIRON_INLINE void add_to(Sums& s, Weights w, Quad x) {
        s.v = _mm512_add_epi16(s.v, _mm512_maddubs_epi16(w.v, x.v));
    }
    CASTIRON_INLINE Ints widen(Sums s) { return {_mm512_madd_epi16(s.v, _mm512_set1_epi16(1))}; }
#endif
};

#ifdef __AVX512VNNI__
inline constexpr int32_t kInt8Zero = 128;
struct Int8Dot : UnsignedDot<255> {
    CASTIRON_INLINE Weights load(const std::byte* p) {
        return {_mm512_xor_si512(load_ints(p).v, _mm512_set1_epi8(static_cast<char>(0x80)))};
    }
};
#else
inline constexpr int32_t kInt8Zero = 0;
// |w| * (sign of w) x: a pair of products is at most 2 * 128 * 127, within int16.
struct Int8Dot {
    struct Weights {
        Ints magnitudes;
        __mmask64 negative;
    };
    using Sums = Ints;
    static constexpr int kMaxQuads = 1 << 30;
    CASTIRON_INLINE Weights load(const std::byte* p) {
        const __m512i w = load_ints(p).v;
        return {{_mm512_abs_epi8(w)}, _mm512_movepi8_mask(w)};
    }
    CASTIRON_INLINE void add_to(Sums& s, const Weights& w, Quad x) {
        const __m512i turned = _mm512_mask_sub_epi8(x.v, w.negative, _mm512_setzero_si512(), x.v);
        const __m512i pairs = _mm512_maddubs_epi16(w.magnitudes.v, turned);
        s.v = _mm512_add_epi32(s.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
    CASTIRON_INLINE Ints widen(Sums s) { return s; }
};
#endif
