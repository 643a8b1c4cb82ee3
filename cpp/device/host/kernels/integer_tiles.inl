// Many rows of codes by AMX: the integer sums of integer_product.inl, which have no order, and its float ones
// in the same order. Weights of eight bits multiply as the signed numbers they are, nibbles as unsigned ones.

// Inputs of a tile, if sums run over as many.
inline constexpr int64_t kCodeDepth = 64;
CASTIRON_INLINE int64_t tile_depth(const Rounding& r) {
    return r.step < r.k && r.step < kCodeDepth ? r.step : kCodeDepth;
}

// V panels for two tiles of rows, or for one. rows: of both.
template <int kHigh, int V, bool kSigned>
CASTIRON_KERNEL void integer_tiles(const IntegerTile& t, int64_t rows) {
    const Rounding& rounding = *t.rounding;
    const int64_t depth = tile_depth(rounding);
    const int64_t scale_bytes = t.half_scales ? 32 : 64;
    const auto stride = static_cast<long>(t.x_stride);
    const std::byte *x = t.x, *codes = t.codes, *scales = t.scales, *offsets = t.offsets;
    int64_t until_next_scale = t.steps_per_scale;
    alignas(64) int32_t sums[V][kHigh * kTileHeight][16];
    int64_t step = 0;
    for (int64_t left = rounding.k; left > 0; left -= rounding.step, ++step) {
        clear_sums();
        // The rows end in zeros: what a tile takes behind the last input adds nothing.
        for (int64_t in_step = left < rounding.step ? left : rounding.step; in_step > 0; in_step -= depth) {
            _tile_loadd(4, x, stride);
            _tile_loadd(6, codes, 64);
            if constexpr (V > 1) _tile_loadd(7, codes + t.panel_bytes, 64);
            if constexpr (kHigh > 1) _tile_loadd(5, x + kTileHeight * t.x_stride, stride);
            if constexpr (kSigned) {
                _tile_dpbssd(0, 4, 6);
                if constexpr (V > 1) _tile_dpbssd(1, 4, 7);
                if constexpr (kHigh > 1) _tile_dpbssd(2, 5, 6);
                if constexpr (kHigh > 1 && V > 1) _tile_dpbssd(3, 5, 7);
            } else {
                _tile_dpbsud(0, 4, 6);
                if constexpr (V > 1) _tile_dpbsud(1, 4, 7);
                if constexpr (kHigh > 1) _tile_dpbsud(2, 5, 6);
                if constexpr (kHigh > 1 && V > 1) _tile_dpbsud(3, 5, 7);
            }
            x += depth;
            codes += depth * 16;
        }
        _tile_stored(0, sums[0], 64);
        if constexpr (V > 1) _tile_stored(1, sums[1], 64);
        if constexpr (kHigh > 1) _tile_stored(2, sums[0][kTileHeight], 64);
        if constexpr (kHigh > 1 && V > 1) _tile_stored(3, sums[1][kTileHeight], 64);
        Vec scale[V], offset[V];
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            scale[v.value] = load_scale(scales + v.value * t.scale_panel_bytes, t.half_scales);
            if (offsets != nullptr)
                offset[v.value] = load_scale(offsets + v.value * t.scale_panel_bytes, t.half_scales);
        });
        for (int64_t r = 0; r < rows; ++r) {
            const std::byte* row = t.x + r * t.x_stride;
            const Vec x_scale = set1(reinterpret_cast<const float*>(row + rounding.scales_at())[step]);
            const Ints start = kSigned ? zero_ints() : load_start(row + rounding.starts_at() + step * 4);
            unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                float* to = t.acc + v.value * t.acc_stride + r * 16;
                Ints sum = load_ints(sums[v.value][r]);
                if constexpr (!kSigned) sum = add(sum, start);
                const Vec so_far = step == 0 ? zero() : load(to);
                Vec y = fma(to_float(sum), mul(x_scale, scale[v.value]), so_far);
                if (offsets != nullptr) {
                    const Vec x_sum = set1(reinterpret_cast<const float*>(row + rounding.sums_at())[step]);
                    y = fma(offset[v.value], x_sum, y);
                }
                store(to, y);
            });
        }
        if (--until_next_scale == 0) {
            until_next_scale = t.steps_per_scale;
            scales += scale_bytes;
            if (offsets != nullptr) offsets += scale_bytes;
        }
    }
}

// All rows of V panels.
template <int V, bool kSigned>
static void integer_tile_rows(IntegerTile t, int64_t rows, int64_t depth) {
    const IntegerTile first = t;
    for_tile_pairs(rows, depth, [&](int64_t begin, int64_t here) {
        t.x = first.x + begin * t.x_stride;
        t.acc = first.acc + begin * 16;
        here > kTileHeight ? integer_tiles<2, V, kSigned>(t, here) : integer_tiles<1, V, kSigned>(t, here);
    });
}

template <Codes kFormat, int V>
static void integer_tile_panels(IntegerTile t, int64_t rows, std::byte* unpacked) {
    const int64_t quads = (t.rounding->k + 3) / 4;
    const int64_t depth = tile_depth(*t.rounding);
    if constexpr (kFormat == Codes::kInt8) {
        integer_tile_rows<V, true>(t, rows, depth);
    } else {
        for (int v = 0; v < V; ++v)
            unpack_panel<kFormat>(t.codes + v * t.panel_bytes, quads, unpacked + v * quads * 64);
        t.codes = unpacked;
        t.panel_bytes = quads * 64;
        integer_tile_rows<V, false>(t, rows, depth);
    }
}

template <Codes kFormat>
static void integer_tile_product(IntegerTile t, int64_t rows, int64_t panels, std::byte* unpacked) {
    while (panels > 0) {
        const int64_t here = panels < 2 ? 1 : 2;
        here == 2 ? integer_tile_panels<kFormat, 2>(t, rows, unpacked)
                  : integer_tile_panels<kFormat, 1>(t, rows, unpacked);
        panels -= here;
        t.codes += here * t.panel_bytes;
        t.scales += here * t.scale_panel_bytes;
        if (t.offsets != nullptr) t.offsets += here * t.scale_panel_bytes;
        t.acc += here * t.acc_stride;
    }
    _tile_release();
}

// Few rows, and steps that no tile has the width of, go by VNNI.
static void tiled_integer_product(const QuantizedArgs& a, int64_t row_begin, int64_t row_end,
                                  int64_t block_begin, int64_t block_end, float* acc, std::byte* unpacked) {
    constexpr int64_t kFewRows = 8;
    const int64_t rows = row_end - row_begin, per_block = a.gated ? 2 : 1, step = a.rounding.step;
    if (rows <= kFewRows || (step < a.rounding.k && step > kCodeDepth && step % kCodeDepth != 0)) {
        return integer_product(a, row_begin, row_end, block_begin, block_end, acc, unpacked);
    }
    const int64_t panels = (block_end - block_begin) * per_block;
    const IntegerTile t = first_tile(a, row_begin, rows, block_begin * per_block, acc);
    switch (a.weight.format) {
        case Codes::kInt8:
            return integer_tile_product<Codes::kInt8>(t, rows, panels, unpacked);
        case Codes::kInt4:
            return integer_tile_product<Codes::kInt4>(t, rows, panels, unpacked);
        case Codes::kFp4:
            return integer_tile_product<Codes::kFp4>(t, rows, panels, unpacked);
        case Codes::kFp8:
            break;
    }
    __builtin_unreachable();
}
