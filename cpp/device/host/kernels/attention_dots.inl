// Products of attention by sums of two products of bf16 (bf16_dots.inl): pairs of inputs and pairs of keys,
// each output one chain in ascending order.

struct DotProducts : Bf16Products {
    static constexpr int kMaxRows = kMaxAttentionRows;

    template <CacheType>
    static void scores(const AttentionArgs& a, const float* packed, int rows, const std::byte* keys,
                       float* scores, NextLines next) {
        score_block<DotForm>(packed, bf16_row_bytes(a.head_dim) / 4, rows, a.head_dim / 2, keys, scores,
                             next);
    }

    // The first key's neighbour may be masked: its weight is zero, and its value is in the cache.
    template <CacheType>
    static void values(const AttentionArgs& a, const std::byte** blocks, const SegmentKeys& keys, int rows,
                       const AttentionScratch& scratch, float* out, int64_t out_stride) {
        clear_behind(a, blocks, keys.end, scratch);
        value_block<DotForm>(a, blocks, scratch.scores, rows, keys.begin / 2, (keys.end + 1) / 2, out,
                             out_stride);
    }
};
