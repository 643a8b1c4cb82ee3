// Sums of a product become outputs.

// How rows of outputs are stored: as float32.
struct FloatRows {
    CASTIRON_INLINE void store(const LinearOutput& a, int64_t row, int64_t column, Vec v, int lanes) {
        store_n(a.y + (a.places == nullptr ? row : a.places[row]) * a.n + column, v, lanes);
    }
    // Of rows that may be past the end, whose places are not known.
    CASTIRON_INLINE const void* at(const LinearOutput& a, int64_t row, int64_t column) {
        return a.y + (a.places == nullptr ? row : 0) * a.n + column;
    }
};

// Sums of one block become outputs. `sums` (and those of the up panel behind) are used up.
template <typename Rows>
static void linear_epilogue(const LinearOutput& a, int64_t row_begin, int64_t rows, int64_t block,
                            float* sums) {
    const int64_t column = block * 16;
    const int lanes = a.n - column < 16 ? static_cast<int>(a.n - column) : 16;
    float* up = sums + rows * 16;
    if (a.bias != nullptr) {
        const Vec bias = a.gated ? load(a.bias + 2 * column) : load_n(a.bias + column, lanes);
        map_rows(sums, rows, [&](Vec v) { return add(v, bias); });
        if (a.gated) {
            const Vec up_bias = load(a.bias + 2 * column + 16);
            map_rows(up, rows, [&](Vec v) { return add(v, up_bias); });
        }
    }
    activate(a.activation, sums, rows);
    const Vec alpha = set1(a.alpha);
    constexpr int64_t kAhead = 12;  // rows: too far apart for the processor to foresee
    for (int64_t r = 0; r < rows; ++r) {
        prefetch_to_write(Rows::at(a, row_begin + r + kAhead, column));
        Vec v = load(sums + r * 16);
        if (a.gated) v = mul(v, load(up + r * 16));
        if (a.alpha != 1.0f) v = mul(v, alpha);
        if (a.residual != nullptr) v = add(v, load_n(a.residual + (row_begin + r) * a.n + column, lanes));
        Rows::store(a, row_begin + r, column, v, lanes);
    }
}

// Adds one row's adapter to the sums of V panels that take the same ranks: for each output one chain over
// ascending ranks, from zero.
template <int V>
static void lora_expand(const LoraPanel* panels, const float* shrunk, float* sums, int64_t stride) {
    Vec c[V];
    unrolled<V>([&](auto v) CASTIRON_UNROLLED { c[v.value] = zero(); });
    for (int64_t i = 0; i < panels[0].count; ++i) {
        const Vec a = set1(shrunk[panels[0].first + i]);
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            c[v.value] = fma(a, load(panels[v.value].b + i * 16), c[v.value]);
        });
    }
    unrolled<V>([&](auto v) CASTIRON_UNROLLED {
        float* to = sums + v.value * stride;
        store(to, add(load(to), c[v.value]));
    });
}

// `sums` are those of panels [first, first + count) for all rows.
static void lora_output(const LoraRows& lora, int64_t row_begin, int64_t rows, int64_t first, int64_t count,
                        float* sums) {
    constexpr int kTogether = 4;
    for (int64_t r = 0; r < rows; ++r) {
        const LoraStep* adapter = lora.adapters[row_begin + r];
        if (adapter == nullptr || adapter[lora.step].panels == nullptr) continue;
        const LoraPanel* panels = adapter[lora.step].panels + first;
        const float* shrunk = lora.shrunk + (row_begin + r) * lora.stride;
        const auto alike = [&](int64_t p) {
            return panels[p].first == panels[p - 1].first && panels[p].count == panels[p - 1].count;
        };
        for (int64_t p = 0; p < count;) {
            float* to = sums + (p * rows + r) * 16;
            if (p + kTogether <= count && alike(p + 1) && alike(p + 2) && alike(p + 3)) {
                lora_expand<kTogether>(panels + p, shrunk, to, rows * 16);
                p += kTogether;
            } else {
                lora_expand<1>(panels + p, shrunk, to, rows * 16);
                ++p;
            }
        }
    }
}

template <typename Rows>
static void linear_output(const LinearOutput& a, int64_t row_begin, int64_t row_end, int64_t block_begin,
                          int64_t block_end, float* acc) {
    const int64_t rows = row_end - row_begin, panel_floats = rows * 16, per_block = a.gated ? 2 : 1;
    if (a.lora != nullptr) {
        lora_output(*a.lora, row_begin, rows, block_begin * per_block, (block_end - block_begin) * per_block,
                    acc);
    }
    for (int64_t block = block_begin; block < block_end; ++block) {
        linear_epilogue<Rows>(a, row_begin, rows, block,
                              acc + (block - block_begin) * per_block * panel_floats);
    }
}
