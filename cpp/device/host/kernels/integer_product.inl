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

// Weights of one format as the dot product takes them.
struct Int8Form : Int8Dot {
    static constexpr int kRows = kInt8Rows;
    static constexpr int kPanels = kInt8Panels;  // of a stream, at most
    static constexpr int64_t kQuadBytes = 64;
    static constexpr bool kStartsAtZero = kInt8Zero == 0;
};

// Nibbles as they are stored. int4 is code + 8; fp4 becomes twice its value, plus 12.
template <Codes kFormat>
struct NibbleForm : UnsignedDot {
    static constexpr int kRows = 4;  // more rows share what unpack_panel spreads out
    static constexpr int kPanels = 4;
    static constexpr int64_t kQuadBytes = 32;
    static constexpr bool kStartsAtZero = false;
    CASTIRON_INLINE Ints load(const std::byte* p) {
        if constexpr (kFormat == Codes::kInt4) {
            return load_nibbles(p);
        } else {
            static constexpr int8_t kDoubled[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                    12, 11, 10, 9,  8,  6,  4,  0};
            return look_up_bytes(kDoubled, load_nibbles(p));
        }
    }
};

struct UnpackedForm : UnsignedDot {
    static constexpr int kRows = kNibbleRows;
    static constexpr int64_t kQuadBytes = 64;
    static constexpr bool kStartsAtZero = false;
    CASTIRON_INLINE Ints load(const std::byte* p) { return load_ints(p); }
};

static void set_sums(Codes format, Rounding& r) {
    r.unit = format == Codes::kFp4 ? 0.5f : 1.0f;
    r.zero = format == Codes::kInt8 ? kInt8Zero : format == Codes::kInt4 ? 8 : 12;
    r.paired = kPairedSums && format != Codes::kInt8;
    // int16 holds 64 inputs of pairs up to 8 * 127 * 2, or 32 of pairs up to 12 * 127 * 2.
    r.chunk = !r.paired ? r.step : format == Codes::kInt4 ? 64 : 32;
}

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
    // What is asked for meanwhile: a line of each panel for every quad, or for every two whose codes fill one
    // line; from `next_end` on what lies `next_jump` bytes further. Nothing is read, so it may point past the
    // end.
    const std::byte* next = nullptr;
    const std::byte* next_end = nullptr;
    int64_t next_jump = 0;
    int64_t next_panel_bytes = 0;
    int64_t next_step = 0;
};

// R rows of V panels over all inputs.
template <typename Form, int R, int V>
CASTIRON_KERNEL void integer_tile(const IntegerTile& t) {
    const Rounding& rounding = *t.rounding;
    const int64_t quads = (rounding.k + 3) / 4, step_quads = (rounding.step + 3) / 4;
    const int64_t chunk_quads = (rounding.chunk + 3) / 4, chunks = rounding.chunks_per_step();
    const int64_t scale_bytes = t.half_scales ? 32 : 64, x_stride = t.x_stride, panel_bytes = t.panel_bytes;
    const std::byte *x = t.x, *codes = t.codes, *next = t.next;
    const std::byte* scales = t.scales;
    const std::byte* offsets = t.offsets;
    const std::byte* x_scales = x + rounding.scales_at();
    const std::byte* starts = x + rounding.starts_at();
    const int64_t sums_behind = rounding.sums_at() - rounding.scales_at();
    const std::byte* next_end = t.next_end;
    int64_t until_next_scale = t.steps_per_scale;
    bool first_step = true;
    for (int64_t left = quads; left > 0;) {
        Ints c[R][V];
        alignas(64) int32_t folded[R][V][16];
        int64_t in_step = left < step_quads ? left : step_quads;
        left -= in_step;
        for (int64_t chunk = 0;; ++chunk) {
            unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                const Ints start =
                    Form::kStartsAtZero ? zero_ints() : load_start(starts + r.value * x_stride + chunk * 4);
                unrolled<V>([&](auto v) CASTIRON_UNROLLED { c[r.value][v.value] = start; });
            });
            const auto quad = [&](int64_t i) CASTIRON_UNROLLED {
                typename Form::Weights w[V];
                unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                    w[v.value] = Form::load(codes + v.value * panel_bytes + i * Form::kQuadBytes);
                });
                unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                    const Quad four = load_quad(x + r.value * x_stride + i * 4);
                    unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                        Form::add_to(c[r.value][v.value], w[v.value], four);
                    });
                });
            };
            const auto ask = [&]() CASTIRON_UNROLLED {
                unrolled<V>([&](auto v) CASTIRON_UNROLLED { prefetch(next + v.value * t.next_panel_bytes); });
                next += t.next_step;
                next += next == next_end ? t.next_jump : 0;
            };
            int64_t in_chunk = in_step < chunk_quads ? in_step : chunk_quads;
            in_step -= in_chunk;
            for (; in_chunk >= 2; in_chunk -= 2) {
                ask();
                quad(0);
                if constexpr (Form::kQuadBytes == 64) ask();
                quad(1);
                codes += 2 * Form::kQuadBytes;
                x += 8;
            }
            if (in_chunk > 0) {
                quad(0);
                codes += Form::kQuadBytes;
                x += 4;
            }
            if (chunks == 1) break;
            unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED {
                Ints sum = Form::widen(c[r.value][v.value]);
                if (chunk > 0) sum = add(sum, load_ints(folded[r.value][v.value]));
                store_ints(folded[r.value][v.value], sum);
            });
            if (in_step == 0) break;
        }
        starts += chunks * 4;
        const auto finish = [&](auto has_folded) CASTIRON_UNROLLED {
            unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                const std::byte* scale_at = scales + v.value * t.scale_panel_bytes;
                const Vec scale = load_scale(scale_at, t.half_scales);
                prefetch(scale_at + V * t.scale_panel_bytes);
                unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                    const auto* x_scale = reinterpret_cast<const float*>(x_scales + r.value * x_stride);
                    float* to = t.acc + v.value * t.acc_stride + r.value * 16;
                    const Ints sum = has_folded.value != 0 ? load_ints(folded[r.value][v.value])
                                                           : Form::widen(c[r.value][v.value]);
                    const Vec so_far = first_step ? zero() : load(to);
                    store(to, fma(to_float(sum), mul(set1(*x_scale), scale), so_far));
                });
            });
        };
        if (chunks == 1) {
            finish(Int<0>{});
        } else {
            finish(Int<1>{});
        }
        if (offsets != nullptr) {
            unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                const Vec offset = load_scale(offsets + v.value * t.scale_panel_bytes, t.half_scales);
                unrolled<R>([&](auto r) CASTIRON_UNROLLED {
                    const auto* x_sum =
                        reinterpret_cast<const float*>(x_scales + r.value * x_stride + sums_behind);
                    float* to = t.acc + v.value * t.acc_stride + r.value * 16;
                    store(to, fma(offset, set1(*x_sum), load(to)));
                });
            });
        }
        first_step = false;
        x_scales += 4;
        if (--until_next_scale == 0) {
            until_next_scale = t.steps_per_scale;
            scales += scale_bytes;
            if (offsets != nullptr) offsets += scale_bytes;
        }
    }
}

// Nibbles of a panel as bytes.
template <Codes kFormat>
static void unpack_panel(const std::byte* codes, int64_t quads, std::byte* to) {
    for (int64_t quad = 0; quad < quads; ++quad) {
        store_ints(to + quad * 64, NibbleForm<kFormat>::load(codes + quad * 32));
    }
}

// Times that a tile asks for lines.
template <typename Form>
CASTIRON_INLINE int64_t asks(int64_t k) {
    return (k + 7) / 8 * (Form::kQuadBytes == 64 ? 2 : 1);
}

// R rows of all panels, as many panels at once as registers allow, then one by one: as many streams from
// memory.
template <typename Form, int R>
static void integer_stream(IntegerTile t, int64_t panels) {
    constexpr int V = dot_panels(R) < Form::kPanels ? dot_panels(R) : Form::kPanels;
    t.next_panel_bytes = t.panel_bytes;
    t.next_step = 64;
    const auto run = [&](auto v) {
        // Near the end of these panels come the first lines of the next ones.
        const int64_t bytes = asks<Form>(t.rounding->k) * t.next_step;
        t.next = t.codes + (kCodesAhead < bytes ? kCodesAhead : 0);
        t.next_end = t.codes + bytes;
        t.next_jump = v.value * t.panel_bytes - bytes;
        integer_tile<Form, R, v.value>(t);
        t.codes += v.value * t.panel_bytes;
        t.scales += v.value * t.scale_panel_bytes;
        if (t.offsets != nullptr) t.offsets += v.value * t.scale_panel_bytes;
        t.acc += v.value * t.acc_stride;
    };
    for (; panels >= V; panels -= V) run(Int<V>{});
    if constexpr (V > 1) {
        for (; panels > 0; --panels) run(Int<1>{});
    }
}

// All rows of V panels in groups of nearly equal height, while the next panels are fetched, a share by each
// group.
template <typename Form, int V>
static void integer_groups(IntegerTile t, int64_t rows, const std::byte* next, int64_t stored_panel_bytes) {
    const int64_t groups = (rows + Form::kRows - 1) / Form::kRows, times = asks<Form>(t.rounding->k);
    const std::byte* const x = t.x;
    float* const acc = t.acc;
    t.next = next;
    t.next_end = nullptr;
    t.next_panel_bytes = stored_panel_bytes;
    t.next_step = (stored_panel_bytes / times + groups - 1) / groups;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = rows * g / groups, end = rows * (g + 1) / groups;
        t.x = x + begin * t.x_stride;
        t.acc = acc + begin * 16;
        with_rows<Form::kRows>(end - begin, [&](auto r) { integer_tile<Form, r.value, V>(t); });
        t.next += times * t.next_step;
    }
}

// Rows that several groups share: nibbles are spread out once for all of them.
template <Codes kFormat, int V>
static void integer_panels(IntegerTile t, int64_t rows, std::byte* unpacked) {
    const int64_t quads = (t.rounding->k + 3) / 4, stored = t.panel_bytes;
    const std::byte* next = t.codes + V * stored;
    if constexpr (kFormat == Codes::kInt8) {
        integer_groups<Int8Form, V>(t, rows, next, stored);
    } else {
        for (int v = 0; v < V; ++v)
            unpack_panel<kFormat>(t.codes + v * stored, quads, unpacked + v * quads * 64);
        t.codes = unpacked;
        t.panel_bytes = quads * 64;
        integer_groups<UnpackedForm, V>(t, rows, next, stored);
    }
}

template <Codes kFormat>
static void integer_product_of(IntegerTile t, int64_t rows, int64_t panels, std::byte* unpacked) {
    constexpr bool kInt8 = kFormat == Codes::kInt8;
    using Form = std::conditional_t<kInt8, Int8Form, NibbleForm<kFormat>>;
    if (rows <= Form::kRows) {
        with_rows<Form::kRows>(rows, [&](auto r) { integer_stream<Form, r.value>(t, panels); });
        return;
    }
    constexpr int V = dot_panels(kInt8 ? kInt8Rows : kNibbleRows);
    while (panels > 0) {
        const int64_t here = panels < V ? 1 : V;
        if (here == V) {
            integer_panels<kFormat, V>(t, rows, unpacked);
        } else {
            integer_panels<kFormat, 1>(t, rows, unpacked);
        }
        panels -= here;
        t.codes += here * t.panel_bytes;
        t.scales += here * t.scale_panel_bytes;
        if (t.offsets != nullptr) t.offsets += here * t.scale_panel_bytes;
        t.acc += here * t.acc_stride;
    }
}

// The first row and panel of a call.
static IntegerTile first_tile(const QuantizedArgs& a, int64_t row_begin, int64_t rows, int64_t panel,
                              float* acc) {
    const QuantizedWeight& w = a.weight;
    IntegerTile t;
    t.x = a.x + row_begin * a.x_stride;
    t.x_stride = a.x_stride;
    t.rounding = &a.rounding;
    t.panel_bytes = w.panel_bytes();
    t.scale_panel_bytes = w.scale_panel_bytes();
    t.half_scales = w.half_scales;
    t.steps_per_scale = (w.group + a.rounding.step - 1) / a.rounding.step;
    t.codes = w.codes + panel * t.panel_bytes;
    t.scales = w.scales + panel * t.scale_panel_bytes;
    t.offsets = w.offsets == nullptr ? nullptr : w.offsets + panel * t.scale_panel_bytes;
    t.acc = acc;
    t.acc_stride = rows * 16;
    return t;
}

// Loads of vectors are foreseen: nothing of `ahead` is of use.
static void integer_product(const QuantizedArgs& a, int64_t row_begin, int64_t row_end, int64_t block_begin,
                            int64_t block_end, float* acc, std::byte* unpacked, const WeightsAhead&) {
    const int64_t rows = row_end - row_begin, per_block = a.gated ? 2 : 1;
    const int64_t panels = (block_end - block_begin) * per_block;
    const IntegerTile t = first_tile(a, row_begin, rows, block_begin * per_block, acc);
    switch (a.weight.format) {
        case Codes::kInt8:
            return integer_product_of<Codes::kInt8>(t, rows, panels, unpacked);
        case Codes::kInt4:
            return integer_product_of<Codes::kInt4>(t, rows, panels, unpacked);
        case Codes::kFp4:
            return integer_product_of<Codes::kFp4>(t, rows, panels, unpacked);
        case Codes::kFp8:
            break;
    }
    __builtin_unreachable();
}
