// Products of float activations and weights that are codes. A block of weights becomes floats in scratch,
// exactly as value * scale (+ offset), and then serves all rows as in linear_product.inl: the same chains, so
// the same bits as a product with the dequantized matrix.

// The numbers of input kInput of a quad, for its sixteen outputs.
template <Codes kFormat, int kInput>
CASTIRON_INLINE Vec code_value(Ints quad) {
    if constexpr (kFormat == Codes::kInt8) {
        return to_float(shift_right_signed<24>(shift_left<24 - 8 * kInput>(quad)));
    } else if constexpr (kFormat == Codes::kInt4) {
        return sub(to_float(bit_and(shift_right<8 * kInput>(quad), set1_int(0xff))), set1(8.0f));
    } else if constexpr (kFormat == Codes::kFp4) {
        static constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        const Ints doubled = shift_left<24 - 8 * kInput>(look_up_bytes(kDoubled, quad));
        return mul(to_float(shift_right_signed<24>(doubled)), set1(0.5f));
    } else {
        return from_e4m3(bit_and(shift_right<8 * kInput>(quad), set1_int(0xff)));
    }
}

template <Codes kFormat>
CASTIRON_INLINE Ints load_quad_codes(const std::byte* codes, int64_t quad) {
    if constexpr (kFormat == Codes::kInt4 || kFormat == Codes::kFp4) {
        return load_nibbles(codes + quad * 32);
    } else {
        return load_ints(codes + quad * 64);
    }
}

// Inputs [k0, k0 + k) of one panel as floats [k][16]; k0 is a multiple of four.
template <Codes kFormat>
static void dequantize_panel(const QuantizedWeight& w, int64_t panel, int64_t k0, int64_t k, float* to) {
    const std::byte* codes = w.codes + panel * w.panel_bytes();
    const int64_t scale_bytes = w.half_scales ? 32 : 64;
    int64_t group = k0 / w.group, group_end = (group + 1) * w.group;
    Vec scale, offset;
    const auto take_scale = [&] {
        const int64_t at = panel * w.scale_panel_bytes() + group * scale_bytes;
        scale = load_scale(w.scales + at, w.half_scales);
        if (w.offsets != nullptr) offset = load_scale(w.offsets + at, w.half_scales);
    };
    take_scale();
    const auto input = [&](int64_t i, Vec value) {
        if (i == group_end) {
            ++group;
            group_end += w.group;
            take_scale();
        }
        value = mul(value, scale);
        if (w.offsets != nullptr) value = add(value, offset);
        store(to + (i - k0) * 16, value);
    };
    for (int64_t i = k0; i < k0 + k; i += 4) {
        const Ints quad = load_quad_codes<kFormat>(codes, i / 4);
        prefetch(codes + i / 4 * (w.panel_bytes() / w.quads()) + kStreamAhead);
        input(i, code_value<kFormat, 0>(quad));
        if (i + 1 < k0 + k) input(i + 1, code_value<kFormat, 1>(quad));
        if (i + 2 < k0 + k) input(i + 2, code_value<kFormat, 2>(quad));
        if (i + 3 < k0 + k) input(i + 3, code_value<kFormat, 3>(quad));
    }
}

static void dequantize(const QuantizedWeight& w, int64_t panel, int64_t k0, int64_t k, float* to) {
    switch (w.format) {
        case Codes::kInt8:
            return dequantize_panel<Codes::kInt8>(w, panel, k0, k, to);
        case Codes::kInt4:
            return dequantize_panel<Codes::kInt4>(w, panel, k0, k, to);
        case Codes::kFp8:
            return dequantize_panel<Codes::kFp8>(w, panel, k0, k, to);
        case Codes::kFp4:
            return dequantize_panel<Codes::kFp4>(w, panel, k0, k, to);
    }
}

static void dequantized_product(const QuantizedArgs& a, int64_t row_begin, int64_t row_end,
                                int64_t block_begin, int64_t block_end, float* acc, float* wide) {
    const int64_t rows = row_end - row_begin, per_block = a.gated ? 2 : 1;
    const int64_t first = block_begin * per_block, last = block_end * per_block;
    const int64_t x_stride = a.x_stride / 4, groups = (rows + kTileRows - 1) / kTileRows;
    const auto* x = reinterpret_cast<const float*>(a.x) + row_begin * x_stride;
    for (int64_t panel = first; panel < last; ++panel) {
        float* sums = acc + (panel - first) * rows * 16;
        for (int64_t k0 = 0; k0 < a.weight.k; k0 += kLinearDepth) {
            const int64_t k = a.weight.k - k0 < kLinearDepth ? a.weight.k - k0 : kLinearDepth;
            dequantize(a.weight, panel, k0, k, wide);
            const Fetch nothing{reinterpret_cast<const std::byte*>(wide), 0, 0};
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t begin = rows * g / groups, end = rows * (g + 1) / groups;
                with_rows<kTileRows>(end - begin, [&](auto r) {
                    product_block<r.value, 1, FloatForm>(x + begin * x_stride + k0, x_stride,
                                                         reinterpret_cast<const std::byte*>(wide), 0, k,
                                                         sums + begin * 16, 0, k0 > 0, nothing, nullptr);
                });
            }
        }
    }
}
