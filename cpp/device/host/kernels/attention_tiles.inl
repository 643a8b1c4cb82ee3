// The products of attention by the matrix unit, for caches of bf16 and of bytes, which become bf16: queries
// and weights are rounded to bf16 as well. Scores are sums as bf16_product.inl has them, over 32 inputs at a
// time; weighted values likewise, over the 32 keys of a block. A row of either depends on its own row of
// queries or weights alone.

// Scores of one or two tiles of rows with the 32 keys of a block. kFetch: asks for NextLines meanwhile.
template <int kHigh, bool kFetch>
CASTIRON_KERNEL void score_tiles(const std::byte* q, int64_t q_stride, int head_dim, const std::byte* keys,
                                 float* scores, NextLines next) {
    clear_sums();
    for (int64_t at = 0; at < head_dim / 2 * kKeyLineBytes; at += 16 * kKeyLineBytes) {
        if constexpr (kFetch) {
            for (int64_t line = at; line < at + 16 * kKeyLineBytes; line += 64) {
                prefetch(next.values + line);
                prefetch(next.keys + line);
            }
        }
        multiply_bf16<kHigh, 2>(q, q_stride, keys + at, keys + at + 64, kKeyLineBytes);
        q += 64;
    }
    store_sums<kHigh, 2>(scores, 16, kScoreStride);
}

// out = weights · values over the blocks [first, last), V times sixteen columns.
template <int kHigh, int V>
CASTIRON_KERNEL void value_tiles(const std::byte* const* blocks, int first, int last, int64_t v_head_dim,
                                 const std::byte* weights, int64_t column, float* out, int64_t out_stride) {
    clear_sums();
    for (int64_t block = first; block < last; ++block) {
        const std::byte* values = blocks[block] + column * 4;
        multiply_bf16<kHigh, V>(weights + block * 64, kScoreStride * 4, values, values + 64, v_head_dim * 4);
    }
    store_sums<kHigh, V>(out, 16, out_stride);
}

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

// What attention.inl asks of a matrix unit.
struct Tiles {
    static constexpr bool kPresent = true;
    static constexpr int kMaxRows = 2 * kTileHeight;

    static bool take(const AttentionArgs& a) {
        return a.cache_type != CacheType::kF32 && a.head_dim % 32 == 0 && a.v_head_dim % 16 == 0;
    }

    // Packed queries as rows of bf16; shapes the tiles for them.
    static void pack(const AttentionArgs& a, int64_t row_begin, int64_t row_end, float* packed) {
        auto* to = reinterpret_cast<std::byte*>(packed);
        for (int64_t row = row_begin; row < row_end; ++row, to += bf16_row_bytes(a.head_dim)) {
            round_bf16_row(query(a, row), a.head_dim, to);
        }
        const int64_t rows = row_end - row_begin;
        shape_tiles(rows < kTileHeight ? rows : kTileHeight, rows > kTileHeight ? rows - kTileHeight : 0, 64);
    }

    // Few rows take keys and values from memory; of more, asking for them would only cost.
    static void scores(const AttentionArgs& a, const float* packed, int rows, const std::byte* keys,
                       float* scores, NextLines next) {
        const auto* q = reinterpret_cast<const std::byte*>(packed);
        rows > kTileHeight
            ? score_tiles<2, false>(q, bf16_row_bytes(a.head_dim), a.head_dim, keys, scores, next)
            : score_tiles<1, true>(q, bf16_row_bytes(a.head_dim), a.head_dim, keys, scores, next);
    }

    CASTIRON_INLINE void store_weights(float* scores, int key, Vec weights) {
        const __m256bh rounded = _mm512_cvtneps_pbh(weights.v);
        __builtin_memcpy(reinterpret_cast<std::byte*>(scores) + key * 2, &rounded, 32);
    }

    static void values(const AttentionArgs& a, const std::byte** blocks, const SegmentKeys& keys, int rows,
                       const AttentionScratch& scratch, float* out, int64_t out_stride) {
        const auto* weights = reinterpret_cast<const std::byte*>(scratch.scores);
        const int first = keys.begin / 32, last = (keys.end + 31) / 32;
        if (keys.end % 32 != 0) {
            // Behind what blocks of bytes became.
            auto* copy = reinterpret_cast<std::byte*>(
                scratch.wide + attention_wide_floats(a.head_dim, a.v_head_dim, a.cache_type));
            copy_tokens(blocks[last - 1], a.v_head_dim, keys.end % 32, copy);
            blocks[last - 1] = copy;
        }
        const auto columns = [&](auto high) {
            int64_t column = 0;
            for (; column + 32 <= a.v_head_dim; column += 32) {
                value_tiles<high.value, 2>(blocks, first, last, a.v_head_dim, weights, column, out + column,
                                           out_stride);
            }
            if (column < a.v_head_dim) {
                value_tiles<high.value, 1>(blocks, first, last, a.v_head_dim, weights, column, out + column,
                                           out_stride);
            }
        };
        rows > kTileHeight ? columns(Int<2>{}) : columns(Int<1>{});
    }

    static void release() { _tile_release(); }
};
