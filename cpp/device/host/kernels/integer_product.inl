// Products of activations and weights that are both codes: exact integer sums over a step of inputs, then one
// multiply-add in float for each step, in ascending order:
//
//   sum += float(integer sum) * (scale of x * scale of w)    [and: sum += offset of w * (scale of x * sum of
//   x)]
//
// Integer sums have no order and the float ones have this, so every instruction set, any number of rows and
// any cut of the work give the same bits.

// Bytes between what a stream reads and what it prefetches.
inline constexpr int64_t kCodesAhead = 1024;

// Weights of one format as unsigned bytes or as what Int8Dot makes of them. kUnpacked: nibbles that
// unpack_panel spread out before.
struct Int8Form : Int8Dot {
    static constexpr int kRows = kInt8Rows;
    static constexpr int64_t kQuadBytes = 64;
};

template <Codes kFormat, bool kUnpacked>
struct NibbleForm : UnsignedDot<kFormat == Codes::kInt4 ? 15 : 24> {
    static constexpr int kRows = kNibbleRows;
    static constexpr int64_t kQuadBytes = kUnpacked ? 64 : 32;
    // int4 is stored as code + 8; fp4 becomes twice its value, plus 12.
    CASTIRON_INLINE Ints load(const std::byte* p) {
        if constexpr (kUnpacked) {
            return load_ints(p);
        } else if constexpr (kFormat == Codes::kInt4) {
            return load_nibbles(p);
        } else {
            static constexpr int8_t kDoubled[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                    12, 11, 10, 9,  8,  6,  4,  0};
            return look_up_bytes(kDoubled, load_nibbles(p));
        }
    }
};

// What a tile reads, for its first row and panel.
struct IntegerTile {
    const std::byte* x = nullptr;
    int64_t x_stride = 0;
    const Rounding* rounding = nullptr;
    const std::byte* codes = nullptr;
    int64_t panel_bytes = 0;
    const std::byte* scales = nullptr;
    const std::byte* offsets = nullptr;
    int64_t scale_panel_bytes = 0;
    bool half_scales = false;
    int64_t steps_per_scale = 1;
    float* acc = nullptr;
    int64_t acc_stride = 0;  // floats between panels
    // What is asked for meanwhile: a line of each panel for every quad. Nothing is read, so it may point past
    // the end.
    const std::byte* next = nullptr;
    int64_t next_panel_bytes = 0;
    int64_t next_step = 0;
};

// R rows of V panels over all inputs.
template <typename Form, int R, int V>
CASTIRON_KERNEL void integer_tile(const IntegerTile& t) {
    const Rounding& rounding = *t.rounding;
    const int64_t quads = (rounding.k + 3) / 4, step_quads = (rounding.step + 3) / 4,
                  steps = rounding.steps();
    const int64_t scale_bytes = t.half_scales ? 32 : 64;
    const std::byte* const x = t.x;
    const int64_t x_stride = t.x_stride;
    const std::byte* codes = t.codes;
    const std::byte* const records = x + rounding.scales_at();
    const std::byte* next = t.next;
    int64_t scale_at = 0, until_next_scale = t.steps_per_scale;
    for (int64_t step = 0, quad = 0; step < steps; ++step) {
        const int64_t end = quad + step_quads < quads ? quad + step_quads : quads;
        typename Form::Sums c[R][V];
        unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED { c[r.value][v.value] = zero_ints(); });
        alignas(64) int32_t folded[R][V][16];
        bool has_folded = false;
        for (;;) {
            const int64_t stop = end - quad > Form::kMaxQuads ? quad + Form::kMaxQuads : end;
            for (; quad < stop; ++quad) {
                typename Form::Weights w[V];
                unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                    w[v.value] = Form::load(codes + v.value * t.panel_bytes);
                    prefetch(next + v.value * t.next_panel_bytes);
                });
                unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                    const Quad four = load_quad(x + r.value * x_stride + quad * 4);
                    unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                        Form::add_to(c[r.value][v.value], w[v.value], four);
                    });
                });
                codes += Form::kQuadBytes;
                next += t.next_step;
            }
            if (quad == end) break;
            unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED {
                int32_t* to = folded[r.value][v.value];
                const Ints sum = Form::widen(c[r.value][v.value]);
                store_ints(to, has_folded ? add(sum, load_ints(to)) : sum);
                c[r.value][v.value] = zero_ints();
            });
            has_folded = true;
        }
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            const int64_t scale_offset = v.value * t.scale_panel_bytes + scale_at;
            const Vec scale = load_scale(t.scales + scale_offset, t.half_scales);
            prefetch(t.scales + scale_offset + kCodesAhead / 4);
            unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                const auto* record = records + r.value * x_stride + step * 4;
                const auto* x_scale = reinterpret_cast<const float*>(record);
                const auto* correction = reinterpret_cast<const int32_t*>(record + steps * 4);
                float* to = t.acc + v.value * t.acc_stride + r.value * 16;
                Ints sum = add(Form::widen(c[r.value][v.value]), set1_int(*correction));
                if (has_folded) sum = add(sum, load_ints(folded[r.value][v.value]));
                const Vec so_far = step == 0 ? zero() : load(to);
                store(to, fma(to_float(sum), mul(set1(*x_scale), scale), so_far));
            });
            if (t.offsets != nullptr) {
                const Vec offset = load_scale(t.offsets + scale_offset, t.half_scales);
                unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                    const auto* x_sum =
                        reinterpret_cast<const float*>(records + r.value * x_stride + (2 * steps + step) * 4);
                    float* to = t.acc + v.value * t.acc_stride + r.value * 16;
                    store(to, fma(offset, set1(*x_sum), load(to)));
                });
            }
        });
        if (--until_next_scale == 0) {
            until_next_scale = t.steps_per_scale;
            scale_at += scale_bytes;
        }
    }
}

// Nibbles of V panels as bytes.
template <Codes kFormat>
static void unpack_panel(const std::byte* codes, int64_t quads, std::byte* to) {
    for (int64_t quad = 0; quad < quads; ++quad) {
        store_ints(to + quad * 64, NibbleForm<kFormat, false>::load(codes + quad * 32));
    }
}

// All rows of V panels in groups of nearly equal height. `ahead`: bytes from these codes to those that come
// next, of which every group fetches a share.
template <typename Form, int V>
static void integer_rows(IntegerTile t, int64_t rows, const std::byte* stored, int64_t stored_bytes,
                         int64_t ahead) {
    const int64_t groups = (rows + Form::kRows - 1) / Form::kRows, quads = (t.rounding->k + 3) / 4;
    const std::byte* const x = t.x;
    float* const acc = t.acc;
    const int64_t quad_bytes = stored_bytes / quads;
    t.next = stored + ahead;
    t.next_panel_bytes = stored_bytes;
    t.next_step = (quad_bytes + groups - 1) / groups;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = rows * g / groups, end = rows * (g + 1) / groups;
        t.x = x + begin * t.x_stride;
        t.acc = acc + begin * 16;
        with_rows<Form::kRows>(end - begin, [&](auto r) { integer_tile<Form, r.value, V>(t); });
        t.next += quads * t.next_step;
    }
}

// V panels of nibbles: one group of rows takes them as they are, more share what is spread out once.
template <Codes kFormat, int V>
static void nibble_rows(IntegerTile t, int64_t rows, int64_t ahead, std::byte* unpacked) {
    const int64_t quads = (t.rounding->k + 3) / 4, stored_bytes = t.panel_bytes;
    const std::byte* stored = t.codes;
    if (rows <= kNibbleRows) {
        integer_rows<NibbleForm<kFormat, false>, V>(t, rows, stored, stored_bytes, ahead);
        return;
    }
    for (int v = 0; v < V; ++v) {
        unpack_panel<kFormat>(stored + v * stored_bytes, quads, unpacked + v * quads * 64);
    }
    t.codes = unpacked;
    t.panel_bytes = quads * 64;
    integer_rows<NibbleForm<kFormat, true>, V>(t, rows, stored, stored_bytes, ahead);
}

template <int V>
static void integer_panels(const QuantizedWeight& w, const IntegerTile& t, int64_t rows,
                           std::byte* unpacked) {
    // A single group of rows reads a stream from memory; more leave time to fetch the next panels whole.
    const int64_t most = w.format == Codes::kInt8 ? kInt8Rows : kNibbleRows;
    const int64_t ahead = rows <= most ? kCodesAhead : V * t.panel_bytes;
    switch (w.format) {
        case Codes::kInt8:
            return integer_rows<Int8Form, V>(t, rows, t.codes, t.panel_bytes, ahead);
        case Codes::kInt4:
            return nibble_rows<Codes::kInt4, V>(t, rows, ahead, unpacked);
        case Codes::kFp4:
            return nibble_rows<Codes::kFp4, V>(t, rows, ahead, unpacked);
        case Codes::kFp8:
            break;
    }
    __builtin_unreachable();
}

static void integer_product(const QuantizedArgs& a, int64_t row_begin, int64_t row_end, int64_t block_begin,
                            int64_t block_end, float* acc, std::byte* unpacked) {
    const QuantizedWeight& w = a.weight;
    const int64_t rows = row_end - row_begin, per_block = a.gated ? 2 : 1;
    const int64_t first = block_begin * per_block, last = block_end * per_block;
    IntegerTile t;
    t.x = a.x + row_begin * a.x_stride;
    t.x_stride = a.x_stride;
    t.rounding = &a.rounding;
    t.panel_bytes = w.panel_bytes();
    t.scale_panel_bytes = w.scale_panel_bytes();
    t.half_scales = w.half_scales;
    t.steps_per_scale = (w.group + a.rounding.step - 1) / a.rounding.step;
    t.acc_stride = rows * 16;
    for (int64_t panel = first; panel < last; panel += kDotPanels) {
        t.codes = w.codes + panel * t.panel_bytes;
        t.scales = w.scales + panel * t.scale_panel_bytes;
        t.offsets = w.offsets == nullptr ? nullptr : w.offsets + panel * t.scale_panel_bytes;
        t.acc = acc + (panel - first) * t.acc_stride;
        if (last - panel >= kDotPanels) {
            integer_panels<kDotPanels>(w, t, rows, unpacked);
        } else {
            integer_panels<1>(w, t, rows, unpacked);
        }
    }
}
