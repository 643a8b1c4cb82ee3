// Products of codes in plain C++: sums over four inputs side by side for each of sixteen outputs, exact.
// Included behind simd/portable.h.

// Four codes of a row of activations, for all outputs.
struct Quad {
    int8_t v[4];
};
CASTIRON_INLINE Quad load_quad(const std::byte* p) {
    Quad q;
    __builtin_memcpy(q.v, p, 4);
    return q;
}

inline constexpr int kDotPanels = 2;
inline constexpr int kInt8Rows = 12, kNibbleRows = 12;
inline constexpr int32_t kInt8Zero = 128;

// Weights are unsigned, at most kLargest; activations within ±127.
template <int kLargest>
struct UnsignedDot {
    using Weights = Ints;
    using Sums = Ints;
    static constexpr int kMaxQuads = 1 << 30;
    CASTIRON_INLINE void add_to(Sums& s, const Weights& w, Quad x) {
        uint8_t bytes[64];
        __builtin_memcpy(bytes, w.v, 64);
        for (int o = 0; o < 16; ++o) {
            for (int i = 0; i < 4; ++i) s.v[o] += bytes[o * 4 + i] * x.v[i];
        }
    }
    CASTIRON_INLINE Ints widen(Sums s) { return s; }
};

struct Int8Dot : UnsignedDot<255> {
    CASTIRON_INLINE Weights load(const std::byte* p) {
        uint8_t bytes[64];
        __builtin_memcpy(bytes, p, 64);
        for (uint8_t& b : bytes) b ^= 0x80;
        return load_ints(bytes);
    }
};
