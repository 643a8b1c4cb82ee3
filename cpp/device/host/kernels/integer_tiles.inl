// Many rows of codes by AMX: the integer sums of integer_product.inl, which have no order, and its float ones
// in the same order. Weights multiply as the signed numbers they stand for.

// Inputs of a tile, if sums run over as many.
inline constexpr int64_t kCodeDepth = 64;
CASTIRON_INLINE int64_t tile_depth(const Rounding& r) {
    return r.step < r.k && r.step < kCodeDepth ? r.step : kCodeDepth;
}

// Nibbles of a panel as signed bytes.
template <Codes kFormat>
static void unpack_signed_panel(const std::byte* codes, int64_t quads, int32_t zero_code, std::byte* to) {
    const __m512i zeros = _mm512_set1_epi8(static_cast<char>(zero_code));
    for (int64_t quad = 0; quad < quads; ++quad) {
        const Ints code = NibbleForm<kFormat>::load(codes + quad * 32);
        store_ints(to + quad * 64, {_mm512_sub_epi8(code.v, zeros)});
    }
}

// Integer sums of one step: two tiles of rows, or one, by V panels. inputs: of the step.
template <int kHigh, int V>
CASTIRON_INLINE void multiply_step(const IntegerTile& t, const std::byte* x, const std::byte* codes,
                                   int64_t inputs, int64_t depth, const TileFetch& fetch) {
    const auto stride = static_cast<long>(t.x_stride);
    clear_sums();
    // The rows end in zeros: what a tile takes behind the last input adds nothing.
    for (; inputs > 0; inputs -= depth) {
        TileFetch::ask<V>(fetch, codes - t.codes);
        _tile_loadd(4, x, stride);
        _tile_loadd(6, codes, 64);
        if constexpr (V > 1) _tile_loadd(7, codes + t.panel_bytes, 64);
        if constexpr (kHigh > 1) _tile_loadd(5, x + kTileHeight * t.x_stride, stride);
        _tile_dpbssd(0, 4, 6);
        if constexpr (V > 1) _tile_dpbssd(1, 4, 7);
        if constexpr (kHigh > 1) _tile_dpbssd(2, 5, 6);
        if constexpr (kHigh > 1 && V > 1) _tile_dpbssd(3, 5, 7);
        x += depth;
        codes += depth * 16;
    }
}

// The sums of S steps, from `step` on, join those of the steps before.
template <int S, int V, bool kOffsets>
CASTIRON_INLINE void add_steps(const IntegerTile& t, int64_t rows, int64_t step, const int32_t* sums,
                               int64_t panel_sums) {
    const Rounding& rounding = *t.rounding;
    const int64_t scale_bytes = t.half_scales ? 32 : 64;
    Vec scale[S][V], offset[S][V];
    unrolled<S, V>([&](auto s, auto v) CASTIRON_UNROLLED {
        const int64_t at = (step + s.value) / t.steps_per_scale * scale_bytes + v.value * t.scale_panel_bytes;
        scale[s.value][v.value] = load_scale(t.scales + at, t.half_scales);
        if constexpr (kOffsets) offset[s.value][v.value] = load_scale(t.offsets + at, t.half_scales);
    });
    const std::byte* x_scale = t.x + rounding.scales_at() + step * 4;
    const int64_t x_sums = rounding.sums_at() - rounding.scales_at();
    float* to = t.acc;
    for (int64_t r = 0; r < rows; ++r) {
        Vec y[V];
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            y[v.value] = step == 0 ? zero() : load(to + v.value * t.acc_stride);
        });
        unrolled<S>([&](auto s) CASTIRON_UNROLLED {
            const auto* x_step = reinterpret_cast<const float*>(x_scale) + s.value;
            const Vec one = set1(*x_step);
            unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                const Ints sum = load_ints(sums + (s.value * V + v.value) * panel_sums);
                y[v.value] = fma(to_float(sum), mul(one, scale[s.value][v.value]), y[v.value]);
                if constexpr (kOffsets) {
                    const auto* x_sum = reinterpret_cast<const float*>(x_scale + x_sums) + s.value;
                    y[v.value] = fma(offset[s.value][v.value], set1(*x_sum), y[v.value]);
                }
            });
        });
        unrolled<V>([&](auto v) CASTIRON_UNROLLED { store(to + v.value * t.acc_stride, y[v.value]); });
        x_scale += t.x_stride;
        sums += 16;
        to += 16;
    }
}

// V panels for two tiles of rows, or for one; rows: of both. Two steps go together, which spares every other
// load and store of the float sums. While the tiles multiply two, the sums of the two before are added: a
// vector load right behind the store of a tile would wait for it.
template <int kHigh, int V, bool kOffsets>
CASTIRON_KERNEL void integer_tiles(const IntegerTile& t, int64_t rows, const TileFetch& fetch) {
    constexpr int64_t kPanelSums = kHigh * kTileHeight * 16, kStepSums = V * kPanelSums;
    const Rounding& rounding = *t.rounding;
    const int64_t depth = tile_depth(rounding), steps = rounding.steps();
    alignas(64) int32_t sums[2][2 * kStepSums];
    const auto multiply = [&](int64_t step, int32_t* to) CASTIRON_UNROLLED {
        const int64_t at = step * rounding.step, left = rounding.k - at;
        multiply_step<kHigh, V>(t, t.x + at, t.codes + at * 16, left < rounding.step ? left : rounding.step,
                                depth, fetch);
        store_sums<kHigh, V>(to, kPanelSums, 16);
    };
    int turn = 0;
    for (int64_t step = 0; step < steps; step += 2, turn ^= 1) {
        multiply(step, sums[turn]);
        if (step > 0) add_steps<2, V, kOffsets>(t, rows, step - 2, sums[turn ^ 1], kPanelSums);
        if (step + 1 < steps) multiply(step + 1, sums[turn] + kStepSums);
    }
    const int64_t last = (steps - 1) / 2 * 2;
    last + 1 < steps ? add_steps<2, V, kOffsets>(t, rows, last, sums[turn ^ 1], kPanelSums)
                     : add_steps<1, V, kOffsets>(t, rows, last, sums[turn ^ 1], kPanelSums);
}

// All rows of V panels; next: the panels that come next, as tiles take them, or null.
template <int V>
static void integer_tile_rows(IntegerTile t, int64_t rows, int64_t depth, const std::byte* next) {
    const IntegerTile first = t;
    const int64_t pairs = (rows + 2 * kTileHeight - 1) / (2 * kTileHeight);
    for_tile_pairs(rows, depth, [&](int64_t begin, int64_t here) {
        t.x = first.x + begin * t.x_stride;
        t.acc = first.acc + begin * 16;
        const TileFetch fetch =
            TileFetch::share(next, t.panel_bytes, depth / 4, begin / (2 * kTileHeight), pairs);
        const auto run = [&](auto high, auto has_offsets) {
            integer_tiles<high.value, V, has_offsets.value != 0>(t, here, fetch);
        };
        if (t.offsets == nullptr) {
            here > kTileHeight ? run(Int<2>{}, Int<0>{}) : run(Int<1>{}, Int<0>{});
        } else {
            here > kTileHeight ? run(Int<2>{}, Int<1>{}) : run(Int<1>{}, Int<1>{});
        }
    });
}

// Nibbles are read as vectors, which are foreseen.
template <Codes kFormat, int V>
static void integer_tile_panels(IntegerTile t, int64_t rows, const std::byte* next, std::byte* unpacked) {
    const int64_t quads = (t.rounding->k + 3) / 4;
    const int64_t depth = tile_depth(*t.rounding);
    if constexpr (kFormat == Codes::kInt8) {
        integer_tile_rows<V>(t, rows, depth, next);
    } else {
        for (int v = 0; v < V; ++v) {
            unpack_signed_panel<kFormat>(t.codes + v * t.panel_bytes, quads, t.rounding->zero,
                                         unpacked + v * quads * 64);
        }
        t.codes = unpacked;
        t.panel_bytes = quads * 64;
        integer_tile_rows<V>(t, rows, depth, nullptr);
    }
}

template <Codes kFormat>
static void integer_tile_product(IntegerTile t, int64_t rows, int64_t panels, std::byte* unpacked,
                                 const std::byte* behind, bool cold) {
    if (cold) fetch_panels(t.codes, (panels < 2 ? panels : 2) * t.panel_bytes);
    while (panels > 0) {
        const int64_t here = panels < 2 ? 1 : 2;
        const std::byte* next = panels > here ? t.codes + here * t.panel_bytes : behind;
        here == 2 ? integer_tile_panels<kFormat, 2>(t, rows, next, unpacked)
                  : integer_tile_panels<kFormat, 1>(t, rows, next, unpacked);
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
                                  int64_t block_begin, int64_t block_end, float* acc, std::byte* unpacked,
                                  const WeightsAhead& ahead) {
    constexpr int64_t kFewRows = 8;
    const int64_t rows = row_end - row_begin, per_block = a.gated ? 2 : 1;
    if (rows <= kFewRows || !fits_tiles(a.rounding)) {
        return integer_product(a, row_begin, row_end, block_begin, block_end, acc, unpacked, ahead);
    }
    const int64_t panels = (block_end - block_begin) * per_block;
    const IntegerTile t = first_tile(a, row_begin, rows, block_begin * per_block, acc);
    const std::byte* behind =
        ahead.next_block < 0 ? nullptr : a.weight.codes + ahead.next_block * per_block * t.panel_bytes;
    switch (a.weight.format) {
        case Codes::kInt8:
            return integer_tile_product<Codes::kInt8>(t, rows, panels, unpacked, behind, ahead.cold);
        case Codes::kInt4:
            return integer_tile_product<Codes::kInt4>(t, rows, panels, unpacked, behind, ahead.cold);
        case Codes::kFp4:
            return integer_tile_product<Codes::kFp4>(t, rows, panels, unpacked, behind, ahead.cold);
        case Codes::kFp8:
            break;
    }
    __builtin_unreachable();
}
