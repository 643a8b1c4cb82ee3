// What products of attention have in common that round queries and weights to bf16, for caches of bf16 and of
// bytes, which become bf16.

// The first `tokens` of a block of values, zeros behind: what lies there may be anything, not-a-number
// included, and a tile multiplies all of it.
static void copy_tokens(const std::byte* values, int64_t v_head_dim, int tokens, std::byte* to) {
    for (int pair = 0; pair < 16; ++pair) {
        const int left = tokens - 2 * pair;
        const Ints mask = set1_int(left >= 2 ? -1 : left == 1 ? 0xffff : 0);
        for (int64_t i = 0; i < v_head_dim * 4; i += 64) {
            const int64_t at = pair * v_head_dim * 4 + i;
            store_ints(to + at, bit_and(load_ints(values + at), mask));
        }
    }
}

struct Bf16Products {
    static constexpr bool kBf16 = true;

    // Queries as rows of bf16, bf16_row_bytes apart.
    static void pack(const AttentionArgs& a, int64_t row_begin, int64_t row_end, float* packed) {
        auto* to = reinterpret_cast<std::byte*>(packed);
        for (int64_t row = row_begin; row < row_end; ++row, to += bf16_row_bytes(a.head_dim)) {
            round_bf16_row(query(a, row), a.head_dim, to);
        }
    }

    CASTIRON_INLINE void store_weights(float* scores, int key, Vec weights) {
        store_rounded(reinterpret_cast<std::byte*>(scores) + key * 2, weights);
    }

    CASTIRON_INLINE void store_rounded(std::byte* to, Vec v) {
        const __m256bh rounded = _mm512_cvtneps_pbh(v.v);
        __builtin_memcpy(to, &rounded, 32);
    }

    // A block of values whose last keys are not there yet is replaced by a copy with zeros in their place.
    static void clear_behind(const AttentionArgs& a, const std::byte** blocks, int end,
                             const AttentionScratch& scratch) {
        if (end % 32 == 0) return;
        // Behind what blocks of bytes became.
        auto* copy = reinterpret_cast<std::byte*>(
            scratch.wide + attention_wide_floats(a.head_dim, a.v_head_dim, a.cache_type));
        copy_tokens(blocks[end / 32], a.v_head_dim, end % 32, copy);
        blocks[end / 32] = copy;
    }

    static void release() {}
};
