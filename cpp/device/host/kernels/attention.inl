// Paged attention over segments of 256 keys. Inside a segment: all scores, their maximum, their exponentials
// and the weighted values, key by key in ascending order; then the segment is merged into the row's running
// result. A masked key has weight zero and changes nothing, so a row's result depends on its own keys alone.

template <bool kBf16>
CASTIRON_INLINE Vec load_cached(const std::byte* base, int64_t element) {
    if constexpr (kBf16) {
        return load_bf16_mixed(reinterpret_cast<const uint16_t*>(base) + element);
    } else {
        return load(reinterpret_cast<const float*>(base) + element);
    }
}

// In the order of lanes that is cheapest (simd's load_bf16_mixed); in_order puts a sum right.
template <bool kBf16>
CASTIRON_INLINE Vec in_order(Vec v) {
    if constexpr (kBf16) {
        return unmix(v);
    } else {
        return v;
    }
}

// What the scores of one block ask for meanwhile, two lines for each element of a key: the block's values,
// and the keys that come next. Nothing is read, so either may be longer or shorter than the block.
struct NextLines {
    const std::byte* values;
    const std::byte* keys;
};

// scores[r][v * 16...] = q[r] · keys, V * 16 keys of one block of [head_dim][32].
template <int R, int V, bool kBf16>
CASTIRON_KERNEL void score_tile(const float* q, int64_t q_stride, int head_dim, const std::byte* keys,
                                float* scores, NextLines next) {
    Vec c[R][V];
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED { c[r.value][v.value] = zero(); });
    constexpr int kLines = kBf16 ? 1 : 2;
    for (int d = 0; d < head_dim; ++d) {
        unrolled<kLines>([&](auto line) CASTIRON_UNROLLED {
            prefetch(next.values + (d * kLines + line.value) * 64);
            prefetch(next.keys + (d * kLines + line.value) * 64);
        });
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            const Vec k = load_cached<kBf16>(keys, d * 32 + v.value * 16);
            unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                c[r.value][v.value] = fma(set1(q[r.value * q_stride + d]), k, c[r.value][v.value]);
            });
        });
    }
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED {
        store(scores + r.value * kSegmentKeys + v.value * 16, in_order<kBf16>(c[r.value][v.value]));
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
    constexpr int64_t kElement = kBf16 ? 2 : 4;
    for_row_groups(rows, [&](int64_t row, auto r) {
        constexpr int V = attention_vecs(r.value) < 2 ? 1 : 2;
        for (int key = 0; key < 32; key += V * 16) {
            score_tile<r.value, V, kBf16>(q + row * q_stride, q_stride, head_dim, keys + key * kElement,
                                          scores + row * kSegmentKeys + key, next);
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
    for (int key = begin; key < end;) {
        const std::byte* block = blocks[key / 32];
        const int stop = end < (key / 32 + 1) * 32 ? end : (key / 32 + 1) * 32;
        for (; key < stop; ++key) {
            const int64_t at = static_cast<int64_t>(key % 32) * v_head_dim + column;
            unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                const Vec value = load_cached<kBf16>(block, at + v.value * 16);
                unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                    c[r.value][v.value] =
                        fma(set1(weights[r.value * kSegmentKeys + key]), value, c[r.value][v.value]);
                });
            });
        }
    }
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED {
        store(out + r.value * out_stride + v.value * 16, in_order<kBf16>(c[r.value][v.value]));
    });
}

template <bool kBf16>
static void value_block(const AttentionArgs& a, const std::byte* const* blocks, const float* weights,
                        int rows, int begin, int end, float* out, int64_t out_stride) {
    const int64_t width = padded16(a.v_head_dim);
    for_row_groups(rows, [&](int64_t row, auto r) {
        constexpr int V = attention_vecs(r.value);
        const float* w = weights + row * kSegmentKeys;
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

// Scores of one row become weights in place, zero where masked over [begin, end). Returns the maximum through
// `top` and the sum through `total`; false when the row sees no key of the segment.
static bool row_softmax(const AttentionArgs& a, int64_t row, int64_t segment_start, int begin, int end,
                        float* scores, float* top, float* total) {
    const int64_t position = row_position(a, row);
    const int64_t first = first_visible(a, position) - segment_start;
    const int64_t past = position + 1 - segment_start;
    const int low = first > begin ? static_cast<int>(first) : begin;
    const int high = past < end ? static_cast<int>(past) : end;
    const int vec_begin = begin / 16 * 16, vec_end = (end + 15) / 16 * 16;
    if (low >= high) {
        for (int i = vec_begin; i < vec_end; i += 16) store(scores + i, zero());
        return false;
    }
    const Vec low_v = set1(static_cast<float>(low)), high_v = set1(static_cast<float>(high));
    const Vec minus_infinity = set1(-__builtin_inff());
    const Vec scale = set1(a.scale);
    const bool capped = a.softcap > 0;
    const Vec cap = set1(a.softcap);
    const Vec slope = set1(a.slopes != nullptr ? a.slopes[row_head(a, row)] : 0.0f);
    const Vec distance = set1(static_cast<float>(segment_start - position));  // of the segment's first key
    Vec m = minus_infinity;
    for (int i = vec_begin; i < vec_end; i += 16) {
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
    for (int i = vec_begin; i < vec_end; i += 16) {
        const Vec e = exp_negative(sub(load(scores + i), top_v));
        store(scores + i, e);
        l = add(l, e);
    }
    *total = sum(l);
    return true;
}

// Packed queries of rows [row_begin, row_end) side by side.
CASTIRON_INLINE void pack_queries(const AttentionArgs& a, int64_t row_begin, int64_t row_end, float* packed,
                                  int64_t stride) {
    for (int64_t row = row_begin; row < row_end; ++row) {
        const float* q = a.q + row / a.group * a.q_stride + row_head(a, row) * a.head_dim;
        float* to = packed + (row - row_begin) * stride;
        for_each_vec(a.head_dim, [&](int64_t i, int n) { store_n(to + i, load_n(q + i, n), n); });
    }
}

// Numbers of one byte become floats, n a multiple of 16; what comes behind is asked for.
template <CacheType kType>
static void widen_cached(const std::byte* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += 16) {
        prefetch(from + i + 1024);
        if constexpr (kType == CacheType::kI8) {
            store(to + i, to_float(load_int8(from + i)));
        } else {
            store(to + i, from_e4m3(load_uint8(from + i)));
        }
    }
}

// One segment for the packed rows. partial r: [0] maximum (-inf: saw nothing), [1] sum, [16..] values.
template <CacheType kType>
static void run_segment(const AttentionArgs& a, int64_t row_begin, int rows, int64_t segment,
                        const float* packed, int64_t packed_stride, float* scores, float* partials,
                        int64_t partial_stride, float* wide) {
    constexpr bool kBf16 = kType == CacheType::kBF16,
                   kBytes = kType == CacheType::kI8 || kType == CacheType::kF8E4M3;
    const int64_t start = segment * kSegmentKeys;
    const int64_t first = first_visible(a, row_position(a, row_begin)) - start;
    const int64_t past = row_position(a, row_begin + rows - 1) + 1 - start;
    const int begin = first > 0 ? (first < kSegmentKeys ? static_cast<int>(first) : kSegmentKeys) : 0;
    const int end = past < kSegmentKeys ? static_cast<int>(past) : kSegmentKeys;
    if (begin >= end) {
        for (int r = 0; r < rows; ++r) partials[r * partial_stride] = -__builtin_inff();
        return;
    }
    const size_t element = kBytes ? 1 : kBf16 ? 2 : 4;
    const auto head = static_cast<size_t>(a.kv_head) * 32 * element;
    const auto keys_at = [&](int64_t block) {
        return a.cache + static_cast<size_t>(a.block_table[block]) * a.block_bytes +
               head * static_cast<size_t>(a.head_dim);
    };
    const int64_t last_block = row_position(a, row_begin + rows - 1) / 32;
    const std::byte* value_blocks[kSegmentKeys / 32] = {};
    for (int b = begin / 32; b * 32 < end; ++b) {
        const int64_t block = start / 32 + b;
        value_blocks[b] = a.cache + static_cast<size_t>(a.block_table[block]) * a.block_bytes + a.v_offset +
                          head * static_cast<size_t>(a.v_head_dim);
        const std::byte* keys = keys_at(block);
        NextLines next{value_blocks[b], keys_at(block < last_block ? block + 1 : block)};
        if constexpr (kBytes) {
            float* values = wide + 32 * a.head_dim + int64_t{b} * 32 * a.v_head_dim;
            widen_cached<kType>(keys, int64_t{32} * a.head_dim, wide);
            widen_cached<kType>(value_blocks[b], int64_t{32} * a.v_head_dim, values);
            keys = reinterpret_cast<const std::byte*>(wide);
            value_blocks[b] = reinterpret_cast<const std::byte*>(values);
        }
        score_block<kBf16>(packed, packed_stride, rows, a.head_dim, keys, scores + b * 32, next);
    }
    for (int r = 0; r < rows; ++r) {
        float* partial = partials + r * partial_stride;
        if (!row_softmax(a, row_begin + r, start, begin, end, scores + r * kSegmentKeys, partial,
                         partial + 1)) {
            partial[0] = -__builtin_inff();
        }
    }
    value_block<kBf16>(a, value_blocks, scores, rows, begin, end, partials + 16, partial_stride);
}

template <typename... Args>
static void run_segment_of(const AttentionArgs& a, Args... args) {
    switch (a.cache_type) {
        case CacheType::kF32:
            return run_segment<CacheType::kF32>(a, args...);
        case CacheType::kBF16:
            return run_segment<CacheType::kBF16>(a, args...);
        case CacheType::kI8:
            return run_segment<CacheType::kI8>(a, args...);
        case CacheType::kF8E4M3:
            return run_segment<CacheType::kF8E4M3>(a, args...);
    }
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
    float* out = a.out + row / a.group * a.out_stride + row_head(a, row) * a.v_head_dim;
    for_each_vec(a.v_head_dim,
                 [&](int64_t i, int n) { store_n(out + i, mul(load(running + 16 + i), scale), n); });
}

static void attention_segment(const AttentionArgs& a, int64_t row_begin, int64_t row_end, int64_t segment,
                              float* partials, int64_t row_stride, float* scratch) {
    const int rows = static_cast<int>(row_end - row_begin);
    const int64_t packed_stride = padded16(a.head_dim);
    float* packed = scratch;
    float* scores = packed + kMaxAttentionRows * packed_stride;
    pack_queries(a, row_begin, row_end, packed, packed_stride);
    float* wide = scores + kMaxAttentionRows * (kSegmentKeys + 2 * attention_partial_floats(a.v_head_dim));
    run_segment_of(a, row_begin, rows, segment, packed, packed_stride, scores, partials, row_stride, wide);
}

static void attention_merge(const AttentionArgs& a, int64_t row, const float* partials, int64_t count,
                            float* scratch) {
    const int64_t width = padded16(a.v_head_dim);
    clear_partial(scratch, width);
    for (int64_t s = 0; s < count; ++s) merge(scratch, partials + s * (16 + width), width);
    finish_row(a, row, scratch);
}

static void attention(const AttentionArgs& a, int64_t row_begin, int64_t row_end, float* scratch) {
    const int rows = static_cast<int>(row_end - row_begin);
    const int64_t packed_stride = padded16(a.head_dim);
    const int64_t width = padded16(a.v_head_dim), stride = 16 + width;
    float* packed = scratch;
    float* scores = packed + kMaxAttentionRows * packed_stride;
    float* running = scores + kMaxAttentionRows * kSegmentKeys;
    float* partials = running + kMaxAttentionRows * stride;
    float* wide = partials + kMaxAttentionRows * stride;
    pack_queries(a, row_begin, row_end, packed, packed_stride);
    for (int r = 0; r < rows; ++r) clear_partial(running + r * stride, width);
    const int64_t first = first_visible(a, row_position(a, row_begin)) / kSegmentKeys;
    const int64_t last = row_position(a, row_end - 1) / kSegmentKeys;
    for (int64_t segment = first; segment <= last; ++segment) {
        run_segment_of(a, row_begin, rows, segment, packed, packed_stride, scores, partials, stride, wide);
        for (int r = 0; r < rows; ++r) merge(running + r * stride, partials + r * stride, width);
    }
    for (int r = 0; r < rows; ++r) finish_row(a, row_begin + r, running + r * stride);
}
