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

// Where sums start (Rounding): the same for all outputs.
CASTIRON_INLINE Ints load_start(const std::byte* p) {
    int32_t start;
    __builtin_memcpy(&start, p, 4);
    return set1_int(start);
}

inline constexpr int32_t kInt8Zero = 128;
inline constexpr bool kPairedSums = false;
inline constexpr int kInt8Rows = 8, kNibbleRows = 8, kInt8Panels = 4;
inline constexpr int dot_panels(int rows) {
    return rows <= 2 ? 4 : 2;
}

// Weights are unsigned; activations within ±127.
struct UnsignedDot {
    using Weights = Ints;
    CASTIRON_INLINE void add_to(Ints& s, const Weights& w, Quad x) {
        uint8_t bytes[64];
        __builtin_memcpy(bytes, w.v, 64);
        for (int o = 0; o < 16; ++o) {
            for (int i = 0; i < 4; ++i) s.v[o] += bytes[o * 4 + i] * x.v[i];
        }
    }
    CASTIRON_INLINE Ints widen(Ints s) { return s; }
};

struct Int8Dot : UnsignedDot {
    CASTIRON_INLINE Weights load(const std::byte* p) {
        uint8_t bytes[64];
        __builtin_memcpy(bytes, p, 64);
        for (uint8_t& b : bytes) b ^= 0x80;
        return load_ints(bytes);
    }
};
