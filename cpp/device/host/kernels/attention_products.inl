// The products of attention by vectors: scores of queries and keys, and sums of weighted values, key by key
// in ascending order. A line holds sixteen numbers and more of one input (keys) or one token (values); a
// cache of bf16 has two of them in a line, side by side, as the weights of panel16x2 do.

// What the scores of one block ask for meanwhile, as many bytes of each as they read: the block's values, and
// the keys that come next. Nothing is read, so either may be longer or shorter than the block.
struct NextLines {
    const std::byte* values;
    const std::byte* keys;
};

inline constexpr int64_t kKeyLineBytes = 32 * 4;

// scores[r][v * 16...] = q[r] · keys, V * 16 keys of one block.
template <int R, int V, bool kBf16>
CASTIRON_KERNEL void score_tile(const float* q, int64_t q_stride, int head_dim, const std::byte* keys,
                                float* scores, NextLines next) {
    Vec c[R][V];
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED { c[r.value][v.value] = zero(); });
    for_cached<kBf16>(0, head_dim, [&](int d, auto odd) CASTIRON_UNROLLED {
        const std::byte* line = cached_line<kBf16>(keys, d, kKeyLineBytes);
        if constexpr (!odd.value) {
            for (const int64_t at : {line - keys, line - keys + 64}) {
                prefetch(next.values + at);
                prefetch(next.keys + at);
            }
        }
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            const Vec k = load_cached<kBf16, odd.value>(line + v.value * 64);
            unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                c[r.value][v.value] = fma(set1(q[r.value * q_stride + d]), k, c[r.value][v.value]);
            });
        });
    });
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED {
        store(scores + r.value * kScoreStride + v.value * 16, c[r.value][v.value]);
    });
}

// f(first row, Int<R>) over groups of R rows, nearly equal ones.
template <typename F>
CASTIRON_INLINE void for_row_groups(int64_t rows, F f) {
    const int64_t groups = (rows + kTileRows - 1) / kTileRows;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = rows * g / groups;
        with_rows<kTileRows>(rows * (g + 1) / groups - begin, [&](auto r) { f(begin, r); });
    }
}

template <bool kBf16>
static void score_block(const float* q, int64_t q_stride, int rows, int head_dim, const std::byte* keys,
                        float* scores, NextLines next) {
    for_row_groups(rows, [&](int64_t row, auto r) {
        constexpr int V = attention_vecs(r.value) < 2 ? 1 : 2;
        for (int key = 0; key < 32; key += V * 16) {
            score_tile<r.value, V, kBf16>(q + row * q_stride, q_stride, head_dim, keys + key * 4,
                                          scores + row * kScoreStride + key, next);
        }
    });
}

// out[r][v] = sum over keys [begin, end) of the segment of weights[r][key] * value[key][v], V vectors wide.
// The last vector may read past its row into the next one (the pool is padded at its end); those lanes of
// `out` are padding as well.
template <int R, int V, bool kBf16>
CASTIRON_KERNEL void value_tile(const std::byte* const* blocks, int64_t v_head_dim, const float* weights,
                                int begin, int end, int64_t column, float* out, int64_t out_stride) {
    Vec c[R][V];
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED { c[r.value][v.value] = zero(); });
    for (int block = begin / 32; block * 32 < end; ++block) {
        const int start = block * 32, from = begin > start ? begin - start : 0;
        const std::byte* values = blocks[block] + column * 4;
        for_cached<kBf16>(
            from, end - start < 32 ? end - start : 32, [&](int key, auto odd) CASTIRON_UNROLLED {
                const std::byte* line = cached_line<kBf16>(values, key, v_head_dim * 4);
                unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                    const Vec value = load_cached<kBf16, odd.value>(line + v.value * 64);
                    unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                        c[r.value][v.value] = fma(set1(weights[r.value * kScoreStride + start + key]), value,
                                                  c[r.value][v.value]);
                    });
                });
            });
    }
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED {
        store(out + r.value * out_stride + v.value * 16, c[r.value][v.value]);
    });
}

template <bool kBf16>
static void value_block(const AttentionArgs& a, const std::byte* const* blocks, const float* weights,
                        int rows, int begin, int end, float* out, int64_t out_stride) {
    const int64_t width = padded16(a.v_head_dim);
    for_row_groups(rows, [&](int64_t row, auto r) {
        constexpr int V = attention_vecs(r.value);
        const float* w = weights + row * kScoreStride;
        float* to = out + row * out_stride;
        int64_t column = 0;
        for (; column + V * 16 <= width; column += V * 16) {
            value_tile<r.value, V, kBf16>(blocks, a.v_head_dim, w, begin, end, column, to + column,
                                          out_stride);
        }
        for (; column < width; column += 16) {
            value_tile<r.value, 1, kBf16>(blocks, a.v_head_dim, w, begin, end, column, to + column,
                                          out_stride);
        }
    });
}
