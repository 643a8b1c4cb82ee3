// Rows of bf16, as the products of bf16 take them.

// x [k] as bf16, padded with zeros to a multiple of 32.
static void round_bf16_row(const float* x, int64_t k, std::byte* row) {
    for (int64_t i = 0; i < k; i += 32) {
        const auto part = [&](int64_t at) {
            const int64_t left = k - at < 0 ? 0 : k - at < 16 ? k - at : 16;
            return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), x + at);
        };
        const __m512bh both = _mm512_cvtne2ps_pbh(part(i + 16), part(i));
        __builtin_memcpy(row + i * 2, &both, 64);
    }
}

// Outputs as such rows.
struct Bf16Rows {
    CASTIRON_INLINE std::byte* at(const LinearOutput& a, int64_t row, int64_t column) {
        return a.rounded + row * bf16_row_bytes(a.n) + column * 2;
    }
    // What pads the row is part of its last sixteen outputs, or of those behind them.
    CASTIRON_INLINE void store(const LinearOutput& a, int64_t row, int64_t column, Vec v, int lanes) {
        std::byte* to = at(a, row, column);
        const __m256bh rounded = _mm512_maskz_cvtneps_pbh(static_cast<__mmask16>((1u << lanes) - 1), v.v);
        __builtin_memcpy(to, &rounded, 32);
        if (column % 32 == 0 && column + 16 >= a.n) __builtin_memset(to + 32, 0, 32);
    }
};
