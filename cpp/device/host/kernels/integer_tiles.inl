// Many rows of codes by AMX: the integer sums of integer_product.inl, which have no order, and its float ones
// in the same order. Weights of eight bits multiply as the signed numbers they are, nibbles as unsigned ones.

// Inputs of a tile, if sums run over as many.
inline constexpr int64_t kCodeDepth = 64;
CASTIRON_INLINE int64_t tile_depth(const Rounding& r) {
    return r.step < r.k && r.step < kCodeDepth ? r.step : kCodeDepth;
}

// Integer sums of one step: two tiles of rows, or one, by V panels. inputs: of the step; first: no rows met
// these weights before, and they may still lie in memory.
template <int kHigh, int V, bool kSigned>
CASTIRON_INLINE void multiply_step(const IntegerTile& t, const std::byte* x, const std::byte* codes,
                                   int64_t inputs, int64_t depth, bool first) {
    const auto stride = static_cast<long>(t.x_stride);
    clear_sums();
    // The rows end in zeros: what a tile takes behind the last input adds nothing.
    for (; inputs > 0; inputs -= depth) {
        if (first) {
            prefetch_tile(codes);
            if constexpr (V > 1) prefetch_tile(codes + t.panel_bytes);
        }
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
}

// The sums of one step join those of the steps before. scales, offsets: of the step.
template <int V, bool kSigned, bool kOffsets>
CASTIRON_INLINE void add_step(const IntegerTile& t, int64_t rows, int64_t step, const std::byte* scales,
                              const std::byte* offsets, const int32_t* sums, int64_t sums_stride) {
    Vec scale[V], offset[V];
    unrolled<V>([&](auto v) CASTIRON_UNROLLED {
        scale[v.value] = load_scale(scales + v.value * t.scale_panel_bytes, t.half_scales);
        if constexpr (kOffsets)
            offset[v.value] = load_scale(offsets + v.value * t.scale_panel_bytes, t.half_scales);
    });
    const Rounding& rounding = *t.rounding;
    const std::byte* x_scale = t.x + rounding.scales_at() + step * 4;
    const int64_t starts = rounding.starts_at() - rounding.scales_at();
    const int64_t x_sums = rounding.sums_at() - rounding.scales_at();
    float* to = t.acc;
    for (int64_t r = 0; r < rows; ++r) {
        const Vec one = set1(*reinterpret_cast<const float*>(x_scale));
        const Ints start = kSigned ? zero_ints() : load_start(x_scale + starts);
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            Ints sum = load_ints(sums + v.value * sums_stride);
            if constexpr (!kSigned) sum = add(sum, start);
            float* at = to + v.value * t.acc_stride;
            const Vec so_far = step == 0 ? zero() : load(at);
            Vec y = fma(to_float(sum), mul(one, scale[v.value]), so_far);
            if constexpr (kOffsets)
                y = fma(offset[v.value], set1(*reinterpret_cast<const float*>(x_scale + x_sums)), y);
            store(at, y);
        });
        x_scale += t.x_stride;
        sums += 16;
        to += 16;
    }
}

// V panels for two tiles of rows, or for one; rows: of both. While the tiles multiply a step, the sums of the
// one before are added: a vector load right behind the store of a tile would wait for it.
template <int kHigh, int V, bool kSigned, bool kOffsets>
CASTIRON_KERNEL void integer_tiles(const IntegerTile& t, int64_t rows, bool first) {
    constexpr int64_t kPanelSums = kHigh * kTileHeight * 16;
    const Rounding& rounding = *t.rounding;
    const int64_t depth = tile_depth(rounding), scale_bytes = t.half_scales ? 32 : 64;
    const std::byte *x = t.x, *codes = t.codes;
    alignas(64) int32_t sums[2][V * kPanelSums];
    const auto add = [&](int64_t step) CASTIRON_UNROLLED {
        const int64_t group = step / t.steps_per_scale * scale_bytes;
        add_step<V, kSigned, kOffsets>(t, rows, step, t.scales + group,
                                       kOffsets ? t.offsets + group : nullptr, sums[step % 2], kPanelSums);
    };
    const int64_t steps = rounding.steps();
    for (int64_t step = 0; step < steps; ++step) {
        const int64_t left = rounding.k - step * rounding.step;
        multiply_step<kHigh, V, kSigned>(t, x, codes, left < rounding.step ? left : rounding.step, depth,
                                         first);
        x += rounding.step;
        codes += rounding.step * 16;
        if (step > 0) add(step - 1);
        int32_t* to = sums[step % 2];
        _tile_stored(0, to, 64);
        if constexpr (V > 1) _tile_stored(1, to + kPanelSums, 64);
        if constexpr (kHigh > 1) _tile_stored(2, to + kTileHeight * 16, 64);
        if constexpr (kHigh > 1 && V > 1) _tile_stored(3, to + kPanelSums + kTileHeight * 16, 64);
    }
    add(steps - 1);
}

// All rows of V panels.
template <int V, bool kSigned>
static void integer_tile_rows(IntegerTile t, int64_t rows, int64_t depth) {
    const IntegerTile first = t;
    for_tile_pairs(rows, depth, [&](int64_t begin, int64_t here) {
        t.x = first.x + begin * t.x_stride;
        t.acc = first.acc + begin * 16;
        const auto run = [&](auto high, auto has_offsets) {
            integer_tiles<high.value, V, kSigned, has_offsets.value != 0>(t, here, kSigned && begin == 0);
        };
        if (t.offsets == nullptr) {
            here > kTileHeight ? run(Int<2>{}, Int<0>{}) : run(Int<1>{}, Int<0>{});
        } else {
            here > kTileHeight ? run(Int<2>{}, Int<1>{}) : run(Int<1>{}, Int<1>{});
        }
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

// Whether whole tiles make up the steps, and reach no further than the zeros that a row ends in.
CASTIRON_INLINE bool fits_tiles(const Rounding& r) {
    return r.step >= r.k || (r.step < kCodeDepth ? kCodeDepth % r.step : r.step % kCodeDepth) == 0;
}

// Few rows, and steps that do not fit tiles, go by VNNI.
static void tiled_integer_product(const QuantizedArgs& a, int64_t row_begin, int64_t row_end,
                                  int64_t block_begin, int64_t block_end, float* acc, std::byte* unpacked) {
    constexpr int64_t kFewRows = 8;
    const int64_t rows = row_end - row_begin, per_block = a.gated ? 2 : 1;
    if (rows <= kFewRows || !fits_tiles(a.rounding)) {
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
