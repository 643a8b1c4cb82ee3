// What attention reads: cached keys and values. A line holds the numbers of one input (keys) or one token
// (values); a cache of bf16 has two of them in a line, side by side, as the weights of panel16x2 do.

// What the scores of one block ask for meanwhile, as many bytes of each as they read: the block's values, and
// the keys that come next. Nothing is read, so either may be longer or shorter than the block.
struct NextLines {
    const std::byte* values;
    const std::byte* keys;
};

inline constexpr int64_t kKeyLineBytes = 32 * 4;

template <bool kPaired>
CASTIRON_INLINE const std::byte* cached_line(const std::byte* base, int index, int64_t line_bytes) {
    return base + (kPaired ? index / 2 : index) * line_bytes;
}

template <bool kPaired, bool kOdd>
CASTIRON_INLINE Vec load_cached(const std::byte* from) {
    if constexpr (kPaired) {
        const auto* pairs = reinterpret_cast<const uint16_t*>(from);
        return kOdd ? load_pair_odd(pairs) : load_pair_even(pairs);
    } else {
        return load(reinterpret_cast<const float*>(from));
    }
}

// f(i, Int<whether odd>) for i in [begin, end); of float32 none is odd.
template <bool kPaired, typename F>
CASTIRON_INLINE void for_cached(int begin, int end, F f) {
    int i = begin;
    if constexpr (kPaired) {
        if (i % 2 != 0 && i < end) f(i++, Int<1>{});
        for (; i + 2 <= end; i += 2) {
            f(i, Int<0>{});
            f(i + 1, Int<1>{});
        }
        if (i < end) f(i, Int<0>{});
    } else {
        for (; i < end; ++i) f(i, Int<0>{});
    }
}

// Where a block's keys and values of the KV head lie.
struct CachedHead {
    explicit CachedHead(const AttentionArgs& args) : a(args) {
        const int64_t element = a.cache_type == CacheType::kF32    ? 4
                                : a.cache_type == CacheType::kBF16 ? 2
                                                                   : 1;
        key_bytes = 32 * element * (element == 2 ? (a.head_dim + 1) / 2 * 2 : a.head_dim);
        value_bytes = 32 * element * a.v_head_dim;
    }

    [[nodiscard]] const std::byte* keys(int64_t block) const { return at(block) + a.kv_head * key_bytes; }
    [[nodiscard]] const std::byte* values(int64_t block) const {
        return at(block) + a.v_offset + a.kv_head * value_bytes;
    }

    const AttentionArgs& a;
    int64_t key_bytes, value_bytes;

private:
    [[nodiscard]] const std::byte* at(int64_t block) const {
        return a.cache + static_cast<size_t>(a.block_table[block]) * a.block_bytes;
    }
};

template <CacheType kType>
CASTIRON_INLINE Vec load_bytes(const std::byte* from) {
    if constexpr (kType == CacheType::kI8) {
        return to_float(load_int8(from));
    } else {
        return from_e4m3(load_uint8(from));
    }
}

// Numbers of one byte become floats, n a multiple of 16; what comes behind is asked for.
template <CacheType kType>
static void widen_cached(const std::byte* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += 16) {
        prefetch(from + i + 1024);
        store(to + i, load_bytes<kType>(from + i));
    }
}

// The same for lines of `columns`, a multiple of 16, that become pairs of bf16, which holds them exactly.
template <CacheType kType>
static void pair_cached(const std::byte* from, int64_t pairs, int64_t columns, std::byte* to) {
    const Ints high = set1_int(static_cast<int32_t>(0xffff0000u));
    for (int64_t pair = 0; pair < pairs; ++pair, from += 2 * columns, to += 4 * columns) {
        for (int64_t i = 0; i < columns; i += 16) {
            prefetch(from + i + 1024);
            const Ints first = as_ints(load_bytes<kType>(from + i));
            const Ints second = as_ints(load_bytes<kType>(from + columns + i));
            store_ints(to + i * 4, bit_or(shift_right<16>(first), bit_and(second, high)));
        }
    }
}

// Keys and values of one block of bytes, as pairs of bf16 or as floats; values: room for those of the
// segment.
template <bool kBf16, CacheType kType>
CASTIRON_INLINE void widen_block(const AttentionArgs& a, int block, float* wide, const std::byte** keys,
                                 const std::byte** values) {
    constexpr int64_t kElement = kBf16 ? 2 : 4;
    auto* to_keys = reinterpret_cast<std::byte*>(wide);
    std::byte* to_values = to_keys + kElement * 32 * (a.head_dim + int64_t{block} * a.v_head_dim);
    if constexpr (kBf16) {
        pair_cached<kType>(*keys, a.head_dim / 2, 32, to_keys);
        pair_cached<kType>(*values, 16, a.v_head_dim, to_values);
    } else {
        widen_cached<kType>(*keys, int64_t{32} * a.head_dim, wide);
        widen_cached<kType>(*values, int64_t{32} * a.v_head_dim, reinterpret_cast<float*>(to_values));
    }
    *keys = to_keys;
    *values = to_values;
}
