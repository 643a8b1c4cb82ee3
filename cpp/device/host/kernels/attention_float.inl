// Products of attention in float32, whatever the cache holds.

struct FloatProducts {
    static constexpr bool kBf16 = false;  // whether queries and weights are rounded to bf16
    static constexpr int kMaxRows = kMaxAttentionRows;

    template <CacheType kType>
    using Form = std::conditional_t<kType == CacheType::kBF16, PairForm, FloatForm>;

    // Queries of rows [row_begin, row_end) side by side.
    static void pack(const AttentionArgs& a, int64_t row_begin, int64_t row_end, float* packed) {
        for (int64_t row = row_begin; row < row_end; ++row, packed += padded16(a.head_dim)) {
            const float* q = query(a, row);
            for_each_vec(a.head_dim, [&](int64_t i, int n) { store_n(packed + i, load_n(q + i, n), n); });
        }
    }

    // Scores of all rows with the 32 keys of a block.
    template <CacheType kType>
    static void scores(const AttentionArgs& a, const float* packed, int rows, const std::byte* keys,
                       float* scores, NextLines next) {
        score_block<Form<kType>>(packed, padded16(a.head_dim), rows, a.head_dim, keys, scores, next);
    }

    CASTIRON_INLINE void store_weights(float* scores, int key, Vec weights) { store(scores + key, weights); }

    // The rows' weights (scratch.scores) times the values of the segment's blocks.
    template <CacheType kType>
    static void values(const AttentionArgs& a, const std::byte** blocks, const SegmentKeys& keys, int rows,
                       const AttentionScratch& scratch, float* out, int64_t out_stride) {
        value_block<Form<kType>>(a, blocks, scratch.scores, rows, keys.begin, keys.end, out, out_stride);
    }

    static void release() {}
};
