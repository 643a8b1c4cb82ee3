// Paged attention over segments of 256 keys. Inside a segment: all scores, their maximum, their exponentials
// and the weighted values; then the segment is merged into the row's running result. A masked key has weight
// zero and changes nothing, so a row's result depends on its own keys alone.

// The first key a query sees; the last one is its own position.
CASTIRON_INLINE int64_t first_visible(const AttentionArgs& a, int64_t position) {
    int64_t first = 0;
    if (a.window > 0 && position - a.window + 1 > first) first = position - a.window + 1;
    if (a.chunk > 0 && position / a.chunk * a.chunk > first) first = position / a.chunk * a.chunk;
    return first;
}

CASTIRON_INLINE int64_t row_position(const AttentionArgs& a, int64_t row) {
    return a.start_position + row / a.group;
}
CASTIRON_INLINE int64_t row_head(const AttentionArgs& a, int64_t row) {
    return static_cast<int64_t>(a.kv_head) * a.group + row % a.group;
}
CASTIRON_INLINE const float* query(const AttentionArgs& a, int64_t row) {
    return a.q + row / a.group * a.q_stride + row_head(a, row) * a.head_dim;
}

// The keys of one segment that any of a call's rows may see, [begin, end) of kSegmentKeys.
struct SegmentKeys {
    SegmentKeys(const AttentionArgs& a, int64_t row_begin, int64_t rows, int64_t segment)
        : start(segment * kSegmentKeys) {
        const int64_t first = first_visible(a, row_position(a, row_begin)) - start;
        const int64_t past = row_position(a, row_begin + rows - 1) + 1 - start;
        begin = first > 0 ? (first < kSegmentKeys ? static_cast<int>(first) : kSegmentKeys) : 0;
        end = past < kSegmentKeys ? static_cast<int>(past) : kSegmentKeys;
    }

    int64_t start;
    int begin, end;
};

// Scores of one row become weights in place, as Products stores them, for whole blocks; zero where masked.
// Returns the maximum through `top` and the sum through `total`; false when the row sees no key of the
// segment.
template <typename Products>
static bool row_softmax(const AttentionArgs& a, int64_t row, const SegmentKeys& keys, float* scores,
                        float* top, float* total) {
    const int64_t position = row_position(a, row);
    const int64_t first = first_visible(a, position) - keys.start;
    const int64_t past = position + 1 - keys.start;
    const int low = first > keys.begin ? static_cast<int>(first) : keys.begin;
    const int high = past < keys.end ? static_cast<int>(past) : keys.end;
    const int block_begin = keys.begin / 32 * 32, block_end = (keys.end + 31) / 32 * 32;
    if (low >= high) {
        for (int i = block_begin; i < block_end; i += 16) Products::store_weights(scores, i, zero());
        return false;
    }
    const Vec low_v = set1(static_cast<float>(low)), high_v = set1(static_cast<float>(high));
    const Vec minus_infinity = set1(-__builtin_inff());
    const Vec scale = set1(a.scale);
    const bool capped = a.softcap > 0;
    const Vec cap = set1(a.softcap);
    const Vec slope = set1(a.slopes != nullptr ? a.slopes[row_head(a, row)] : 0.0f);
    const Vec distance = set1(static_cast<float>(keys.start - position));  // of the segment's first key
    Vec m = minus_infinity;
    for (int i = block_begin; i < block_end; i += 16) {
        Vec s = mul(load(scores + i), scale);
        const Vec key = add(set1(static_cast<float>(i)), lane_index());
        if (capped) s = mul(cap, tanh(div(s, cap)));
        if (a.slopes != nullptr) s = add(s, mul(slope, add(key, distance)));
        if (i < low || i + 16 > high)
            s = select(less(key, low_v), minus_infinity, select(less(key, high_v), s, minus_infinity));
        store(scores + i, s);
        m = max(m, s);
    }
    *top = largest(m);
    const Vec top_v = set1(*top);
    Vec l = zero();
    for (int i = block_begin; i < block_end; i += 16) {
        const Vec e = exp_negative(sub(load(scores + i), top_v));
        Products::store_weights(scores, i, e);
        l = add(l, e);
    }
    *total = sum(l);
    return true;
}

// The parts of a call's scratch: see attention_scratch_floats.
struct AttentionScratch {
    AttentionScratch(const AttentionArgs& a, float* scratch)
        : packed(scratch),
          scores(packed + kMaxAttentionRows * padded16(a.head_dim)),
          running(scores + kMaxAttentionRows * kScoreStride),
          partials(running + kMaxAttentionRows * attention_partial_floats(a.v_head_dim)),
          wide(partials + kMaxAttentionRows * attention_partial_floats(a.v_head_dim)) {}

    float* packed;
    float* scores;
    float* running;
    float* partials;
    float* wide;
};

// One segment for the packed rows. partial r: [0] maximum (-inf: saw nothing), [1] sum, [16..] values.
template <typename Products, CacheType kType>
static void run_segment(const AttentionArgs& a, int64_t row_begin, int rows, int64_t segment,
                        const AttentionScratch& scratch, float* partials, int64_t partial_stride) {
    constexpr bool kBytes = kType == CacheType::kI8 || kType == CacheType::kF8E4M3;
    const SegmentKeys keys(a, row_begin, rows, segment);
    if (keys.begin >= keys.end) {
        for (int r = 0; r < rows; ++r) partials[r * partial_stride] = -__builtin_inff();
        return;
    }
    const CachedHead head(a);
    const int64_t last_block = row_position(a, row_begin + rows - 1) / 32;
    const std::byte* value_blocks[kSegmentKeys / 32] = {};
    for (int b = keys.begin / 32; b * 32 < keys.end; ++b) {
        const int64_t block = keys.start / 32 + b;
        value_blocks[b] = head.values(block);
        const std::byte* block_keys = head.keys(block);
        const NextLines next{value_blocks[b], head.keys(block < last_block ? block + 1 : block)};
        if constexpr (kBytes) {
            widen_block<Products::kBf16, kType>(a, b, scratch.wide, &block_keys, &value_blocks[b]);
        }
        Products::template scores<kType>(a, scratch.packed, rows, block_keys, scratch.scores + b * 32, next);
    }
    for (int r = 0; r < rows; ++r) {
        float* partial = partials + r * partial_stride;
        if (!row_softmax<Products>(a, row_begin + r, keys, scratch.scores + r * kScoreStride, partial,
                                   partial + 1)) {
            partial[0] = -__builtin_inff();
        }
    }
    Products::template values<kType>(a, value_blocks, keys, rows, scratch, partials + 16, partial_stride);
}

using RunSegment = void (*)(const AttentionArgs&, int64_t row_begin, int rows, int64_t segment,
                            const AttentionScratch&, float* partials, int64_t partial_stride);

// bf16 has no attention over a cache of float32.
template <typename Products>
static RunSegment segments_of(CacheType type) {
    switch (type) {
        case CacheType::kF32:
            if constexpr (!Products::kBf16) return run_segment<Products, CacheType::kF32>;
            break;
        case CacheType::kBF16:
            return run_segment<Products, CacheType::kBF16>;
        case CacheType::kI8:
            return run_segment<Products, CacheType::kI8>;
        case CacheType::kF8E4M3:
            return run_segment<Products, CacheType::kF8E4M3>;
    }
    __builtin_unreachable();
}

// running (+)= partial.
CASTIRON_INLINE void merge(float* running, const float* partial, int64_t width) {
    if (partial[0] == -__builtin_inff()) return;
    const float top = running[0] > partial[0] ? running[0] : partial[0];
    const Vec keep_v = exp_negative(set1(running[0] - top));
    const Vec add_v = exp_negative(set1(partial[0] - top));
    float factors[32];
    store(factors, keep_v);
    store(factors + 16, add_v);
    running[0] = top;
    running[1] = __builtin_fmaf(partial[1], factors[16], running[1] * factors[0]);
    for (int64_t i = 16; i < 16 + width; i += 16) {
        store(running + i, fma(load(partial + i), add_v, mul(load(running + i), keep_v)));
    }
}

CASTIRON_INLINE void clear_partial(float* running, int64_t width) {
    running[0] = -__builtin_inff();
    running[1] = 0;
    for (int64_t i = 16; i < 16 + width; i += 16) store(running + i, zero());
}

// The sink takes its share of the softmax; then normalise and write.
template <typename Products>
CASTIRON_INLINE void finish_row(const AttentionArgs& a, int64_t row, const float* running) {
    float factor = 1, total = running[1];
    if (a.sinks != nullptr) {
        const float sink = a.sinks[row_head(a, row)];
        const float top = running[0] > sink ? running[0] : sink;
        float e[16];
        store(e, exp_negative(set1(running[0] - top)));
        factor = e[0];
        store(e, exp_negative(set1(sink - top)));
        total = total * factor + e[0];
    }
    const Vec scale = set1(factor / total * a.v_scale);
    const int64_t token = row / a.group, column = row_head(a, row) * a.v_head_dim;
    if constexpr (Products::kBf16) {
        if (a.rounded_out != nullptr) {
            std::byte* out = a.rounded_out + token * a.rounded_stride + column * 2;
            for (int64_t i = 0; i < a.v_head_dim; i += 16)
                Products::store_rounded(out + i * 2, mul(load(running + 16 + i), scale));
            return;
        }
    }
    float* out = a.out + token * a.out_stride + column;
    for_each_vec(a.v_head_dim,
                 [&](int64_t i, int n) { store_n(out + i, mul(load(running + 16 + i), scale), n); });
}

template <typename Products>
static void attention_segment(const AttentionArgs& a, int64_t row_begin, int64_t row_end, int64_t segment,
                              float* partials, int64_t row_stride, float* memory) {
    const AttentionScratch scratch(a, memory);
    const auto run = segments_of<Products>(a.cache_type);
    Products::pack(a, row_begin, row_end, scratch.packed);
    run(a, row_begin, static_cast<int>(row_end - row_begin), segment, scratch, partials, row_stride);
    Products::release();
}

template <typename Products>
static void attention_merge(const AttentionArgs& a, int64_t row, const float* partials, int64_t count,
                            float* scratch) {
    const int64_t width = padded16(a.v_head_dim);
    clear_partial(scratch, width);
    for (int64_t s = 0; s < count; ++s) merge(scratch, partials + s * (16 + width), width);
    finish_row<Products>(a, row, scratch);
}

template <typename Products>
static void attention(const AttentionArgs& a, int64_t row_begin, int64_t row_end, float* memory) {
    const int rows = static_cast<int>(row_end - row_begin);
    const int64_t width = padded16(a.v_head_dim), stride = 16 + width;
    const AttentionScratch scratch(a, memory);
    const auto run = segments_of<Products>(a.cache_type);
    Products::pack(a, row_begin, row_end, scratch.packed);
    for (int r = 0; r < rows; ++r) clear_partial(scratch.running + r * stride, width);
    const int64_t first = first_visible(a, row_position(a, row_begin)) / kSegmentKeys;
    const int64_t last = row_position(a, row_end - 1) / kSegmentKeys;
    for (int64_t segment = first; segment <= last; ++segment) {
        run(a, row_begin, rows, segment, scratch, scratch.partials, stride);
        for (int r = 0; r < rows; ++r) {
            merge(scratch.running + r * stride, scratch.partials + r * stride, width);
        }
    }
    Products::release();
    for (int r = 0; r < rows; ++r) finish_row<Products>(a, row_begin + r, scratch.running + r * stride);
}

// Products: how queries meet keys and weights meet values; attention_float.inl and its siblings.
template <typename Products>
inline constexpr AttentionKernels attention_kernels{.max_rows = Products::kMaxRows,
                                                    .attention = attention<Products>,
                                                    .segment = attention_segment<Products>,
                                                    .merge = attention_merge<Products>};
