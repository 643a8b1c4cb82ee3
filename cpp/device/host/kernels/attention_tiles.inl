// Products of attention by the matrix unit. Scores are sums as bf16_tiles.inl has them, over 32 inputs at a
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

struct TileProducts : Bf16Products {
    static constexpr int kMaxRows = 2 * kTileHeight;

    // Shapes the tiles as well.
    static void pack(const AttentionArgs& a, int64_t row_begin, int64_t row_end, float* packed) {
        Bf16Products::pack(a, row_begin, row_end, packed);
        const int64_t rows = row_end - row_begin;
        shape_tiles(rows < kTileHeight ? rows : kTileHeight, rows > kTileHeight ? rows - kTileHeight : 0, 64);
    }

    // Few rows take keys and values from memory; of more, asking for them would only cost.
    template <CacheType>
    static void scores(const AttentionArgs& a, const float* packed, int rows, const std::byte* keys,
                       float* scores, NextLines next) {
        const auto* q = reinterpret_cast<const std::byte*>(packed);
        rows > kTileHeight
            ? score_tiles<2, false>(q, bf16_row_bytes(a.head_dim), a.head_dim, keys, scores, next)
            : score_tiles<1, true>(q, bf16_row_bytes(a.head_dim), a.head_dim, keys, scores, next);
    }

    template <CacheType>
    static void values(const AttentionArgs& a, const std::byte** blocks, const SegmentKeys& keys, int rows,
                       const AttentionScratch& scratch, float* out, int64_t out_stride) {
        const auto* weights = reinterpret_cast<const std::byte*>(scratch.scores);
        const int first = keys.begin / 32, last = (keys.end + 31) / 32;
        clear_behind(a, blocks, keys.end, scratch);
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
