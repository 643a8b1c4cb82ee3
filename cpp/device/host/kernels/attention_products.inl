// The products of attention by vectors: scores of queries and keys, and sums of weighted values, in ascending
// order. Forms are those of linear_product.inl: queries and weights are the rows, lines of the cache the
// weights.

// scores[r][v * 16...] = q[r] · keys, V * 16 keys of one block.
template <int R, int V, typename Form>
CASTIRON_KERNEL void score_tile(const float* q, int64_t q_stride, int inputs, const std::byte* keys,
                                float* scores, NextLines next) {
    Vec c[R][V];
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED { c[r.value][v.value] = zero(); });
    for_cached<Form::kPaired>(0, inputs, [&](int d, auto odd) CASTIRON_UNROLLED {
        const std::byte* line = cached_line<Form::kPaired>(keys, d, kKeyLineBytes);
        if constexpr (!odd.value) {
            for (const int64_t at : {line - keys, line - keys + 64}) {
                prefetch(next.values + at);
                prefetch(next.keys + at);
            }
        }
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            const Vec k = load_cached<Form::kPaired, odd.value>(line + v.value * 64);
            unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                const Vec query = set1(q[r.value * q_stride + d]);
                c[r.value][v.value] = Form::multiply_add(query, k, c[r.value][v.value]);
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

template <typename Form>
static void score_block(const float* q, int64_t q_stride, int rows, int inputs, const std::byte* keys,
                        float* scores, NextLines next) {
    for_row_groups(rows, [&](int64_t row, auto r) {
        constexpr int V = attention_vecs(r.value) < 2 ? 1 : 2;
        for (int key = 0; key < 32; key += V * 16) {
            score_tile<r.value, V, Form>(q + row * q_stride, q_stride, inputs, keys + key * 4,
                                         scores + row * kScoreStride + key, next);
        }
    });
}

// out[r][v] = sum over inputs [begin, end) of the segment, which are keys or pairs of them, of
// weights[r][input] * value[input][v], V vectors wide.
// The last vector may read past its row into the next one (the pool is padded at its end); those lanes of
// `out` are padding as well.
template <int R, int V, typename Form>
CASTIRON_KERNEL void value_tile(const std::byte* const* blocks, int64_t v_head_dim, const float* weights,
                                int begin, int end, int64_t column, float* out, int64_t out_stride) {
    Vec c[R][V];
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED { c[r.value][v.value] = zero(); });
    constexpr int kBlock = 32 / Form::kNumbers;
    for (int block = begin / kBlock; block * kBlock < end; ++block) {
        const int start = block * kBlock, from = begin > start ? begin - start : 0;
        const std::byte* values = blocks[block] + column * 4;
        for_cached<Form::kPaired>(
            from, end - start < kBlock ? end - start : kBlock, [&](int i, auto odd) CASTIRON_UNROLLED {
                const std::byte* line = cached_line<Form::kPaired>(values, i, v_head_dim * 4);
                unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                    const Vec value = load_cached<Form::kPaired, odd.value>(line + v.value * 64);
                    unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                        const Vec weight = set1(weights[r.value * kScoreStride + start + i]);
                        c[r.value][v.value] = Form::multiply_add(weight, value, c[r.value][v.value]);
                    });
                });
            });
    }
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED {
        store(out + r.value * out_stride + v.value * 16, c[r.value][v.value]);
    });
}

template <typename Form>
static void value_block(const AttentionArgs& a, const std::byte* const* blocks, const float* weights,
                        int rows, int begin, int end, float* out, int64_t out_stride) {
    const int64_t width = padded16(a.v_head_dim);
    for_row_groups(rows, [&](int64_t row, auto r) {
        constexpr int V = attention_vecs(r.value);
        const float* w = weights + row * kScoreStride;
        float* to = out + row * out_stride;
        int64_t column = 0;
        for (; column + V * 16 <= width; column += V * 16) {
            value_tile<r.value, V, Form>(blocks, a.v_head_dim, w, begin, end, column, to + column,
                                         out_stride);
        }
        for (; column < width; column += 16) {
            value_tile<r.value, 1, Form>(blocks, a.v_head_dim, w, begin, end, column, to + column,
                                         out_stride);
        }
    });
}
