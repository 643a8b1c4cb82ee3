// Matrix products over packed panels.
//
// Inputs are taken in blocks of kLinearDepth. Inside a block every output is one chain of fused multiply-adds
// over ascending k, from zero; the blocks are added in order. Short chains keep the rounding error near that
// of a pairwise sum, and since the borders are the same for any number of rows and any cut of k, a row's
// result never depends on its neighbours. The sums go through scratch (in cache), which costs about two
// percent and keeps one epilogue for all tiles.
//
// Few rows: the weights come from memory and every byte is used once (linear_stream). More rows: each block
// of weights serves several groups of rows; the first group that meets bf16 pairs leaves them behind as
// float32 in scratch for the others, whose loop then is multiply-adds and loads alone (linear_tiled).

// Bytes between what a stream reads and what it prefetches.
inline constexpr int64_t kStreamAhead = 1024;
// Inputs of a call that stay in the second-level cache: all of k runs for one panel before the next, so that
// weights come as one stream. With more, a block of k runs for all panels.
inline constexpr int64_t kNearFloats = int64_t{64} << 10;

// How a tile takes its weights, and how far ahead it asks for those after them.
enum class Weights : uint8_t {
    kFloat,      // panel16
    kPairs,      // panel16x2
    kPairsKept,  // panel16x2, left as panel16 in `wide` as well
};

// What a tile asks for meanwhile: one line of each panel for every two inputs. Nothing is read, so it may
// point past the end.
struct Fetch {
    const std::byte* next = nullptr;
    int64_t panel_bytes = 0;
    int64_t step = 0;  // bytes
};

// acc[v][r] (+)= sum over one block of k of x[r][k] * w[v][k]; acc rows are 16 floats, acc_stride floats
// between panels. wide: [V][kLinearDepth][16].
template <int R, int V, Weights kForm>
CASTIRON_KERNEL void linear_block(const float* x, int64_t x_stride, const std::byte* weight,
                                  int64_t panel_bytes, int64_t k, float* acc, int64_t acc_stride, bool resume,
                                  Fetch fetch, float* wide) {
    Vec c[R][V], w[V];
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED { c[r.value][v.value] = zero(); });
    // One input of all rows times w.
    const auto multiply_add = [&](int64_t i) CASTIRON_UNROLLED {
        unrolled<R>([&](auto r) CASTIRON_UNROLLED {
            const Vec a = set1(x[r.value * x_stride + i]);
            unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                c[r.value][v.value] = fma(a, w[v.value], c[r.value][v.value]);
            });
        });
    };
    const auto take_float = [&](int64_t i) CASTIRON_UNROLLED {
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            w[v.value] = load(reinterpret_cast<const float*>(weight + v.value * panel_bytes) + i * 16);
        });
    };
    const auto take_pair = [&](int64_t i, bool odd) CASTIRON_UNROLLED {
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            const auto* pair = reinterpret_cast<const uint16_t*>(weight + v.value * panel_bytes) + i * 16;
            w[v.value] = odd ? load_pair_odd(pair) : load_pair_even(pair);
            if constexpr (kForm == Weights::kPairsKept)
                store(wide + (v.value * kLinearDepth + i + odd) * 16, w[v.value]);
        });
    };
    int64_t i = 0;
    for (; i + 2 <= k; i += 2) {
        unrolled<V>([&](auto v) CASTIRON_UNROLLED { prefetch(fetch.next + v.value * fetch.panel_bytes); });
        fetch.next += fetch.step;
        if constexpr (kForm == Weights::kFloat) {
            take_float(i);
            multiply_add(i);
            take_float(i + 1);
        } else {
            take_pair(i, false);
            multiply_add(i);
            take_pair(i, true);
        }
        multiply_add(i + 1);
    }
    if (i < k) {
        kForm == Weights::kFloat ? take_float(i) : take_pair(i, false);
        multiply_add(i);
    }
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED {
        float* sum = acc + v.value * acc_stride + r.value * 16;
        store(sum, resume ? add(load(sum), c[r.value][v.value]) : c[r.value][v.value]);
    });
}

inline constexpr int64_t pair_bytes(int64_t k) {
    return (k + 1) / 2 * 64;
}

// All of k for R rows of V panels: as many streams from memory as panels.
template <int R, int V, Weights kForm>
static void linear_stream_tile(const float* x, int64_t x_stride, const std::byte* weight, int64_t panel_bytes,
                               int64_t k, float* acc, int64_t acc_stride) {
    constexpr int64_t step = kForm == Weights::kFloat ? 128 : 64;
    for (int64_t k0 = 0; k0 < k; k0 += kLinearDepth) {
        const std::byte* w = weight + k0 / 2 * step;
        const Fetch fetch{w + kStreamAhead, panel_bytes, step};
        linear_block<R, V, kForm>(x + k0, x_stride, w, panel_bytes,
                                  k - k0 < kLinearDepth ? k - k0 : kLinearDepth, acc, acc_stride, k0 > 0,
                                  fetch, nullptr);
    }
}

// R rows of all `panels`, as many panels at once as registers allow, then in pairs, then alone.
template <int R, Weights kForm>
static void linear_stream(const float* x, int64_t x_stride, const std::byte* weight, int64_t panel_bytes,
                          int64_t panels, int64_t k, float* acc, int64_t acc_stride) {
    constexpr int V = vecs_for(R);
    int64_t p = 0;
    for (; p + V <= panels; p += V) {
        linear_stream_tile<R, V, kForm>(x, x_stride, weight + p * panel_bytes, panel_bytes, k,
                                        acc + p * acc_stride, acc_stride);
    }
    if constexpr (V > 2) {
        for (; p + 2 <= panels; p += 2) {
            linear_stream_tile<R, 2, kForm>(x, x_stride, weight + p * panel_bytes, panel_bytes, k,
                                            acc + p * acc_stride, acc_stride);
        }
    }
    for (; p < panels; ++p) {
        linear_stream_tile<R, 1, kForm>(x, x_stride, weight + p * panel_bytes, panel_bytes, k,
                                        acc + p * acc_stride, acc_stride);
    }
}

// Sums of one block become outputs. `sums` (and those of the up panel behind) are used up.
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
        prefetch_to_write(a.y + (row_begin + r + kAhead) * a.n + column);
        Vec v = load(sums + r * 16);
        if (a.gated) v = mul(v, load(up + r * 16));
        const int64_t at = (row_begin + r) * a.n + column;
        if (a.alpha != 1.0f) v = mul(v, alpha);
        if (a.residual != nullptr) v = add(v, load_n(a.residual + at, lanes));
        store_n(a.y + at, v, lanes);
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

static void linear_output(const LinearOutput& a, int64_t row_begin, int64_t row_end, int64_t block_begin,
                          int64_t block_end, float* acc) {
    const int64_t rows = row_end - row_begin, panel_floats = rows * 16, per_block = a.gated ? 2 : 1;
    if (a.lora != nullptr) {
        lora_output(*a.lora, row_begin, rows, block_begin * per_block, (block_end - block_begin) * per_block,
                    acc);
    }
    for (int64_t block = block_begin; block < block_end; ++block) {
        linear_epilogue(a, row_begin, rows, block, acc + (block - block_begin) * per_block * panel_floats);
    }
}

// One block of k of V panels for all rows, in groups of nearly equal height. `ahead`: bytes from here to the
// block that comes next, of which every group fetches a share; `y`: the outputs, fetched for the epilogue, or
// null.
template <int V, bool kBf16>
static void linear_tile(const float* x, int64_t x_stride, int64_t rows, const std::byte* weight,
                        int64_t panel_bytes, int64_t k, float* acc, int64_t acc_stride, bool resume,
                        int64_t ahead, const float* y, int64_t y_stride, float* wide) {
    int64_t first = 0;
    if constexpr (kBf16) first = rows < 2 * kPairTileRows ? (rows + 1) / 2 : kPairTileRows;
    const int64_t rest = rows - first, groups = (rest + kTileRows - 1) / kTileRows;
    const int64_t shares = groups + (kBf16 ? 1 : 0), step = ((kBf16 ? 64 : 128) + shares - 1) / shares;
    Fetch fetch{weight + ahead, panel_bytes, step};
    const auto enter = [&](int64_t begin, int64_t end) {
        if (y == nullptr) return;
        for (int64_t r = begin; r < end; ++r) prefetch(y + r * y_stride);
    };
    if constexpr (kBf16) {
        enter(0, first);
        with_rows<kPairTileRows>(first, [&](auto r) {
            linear_block<r.value, V, Weights::kPairsKept>(x, x_stride, weight, panel_bytes, k, acc,
                                                          acc_stride, resume, fetch, wide);
        });
        weight = reinterpret_cast<const std::byte*>(wide);
        panel_bytes = kLinearDepth * 64;
        fetch.next += k / 2 * step;
    }
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = first + rest * g / groups, end = first + rest * (g + 1) / groups;
        enter(begin, end);
        with_rows<kTileRows>(end - begin, [&](auto r) {
            linear_block<r.value, V, Weights::kFloat>(x + begin * x_stride, x_stride, weight, panel_bytes, k,
                                                      acc + begin * 16, acc_stride, resume, fetch, nullptr);
        });
        fetch.next += k / 2 * step;
    }
}

// All panels of a call; y: the first one's outputs.
template <bool kBf16>
static void linear_tiled(const LinearArgs& a, const float* x, int64_t rows, const std::byte* weight,
                         int64_t panel_bytes, int64_t panels, const float* y, float* acc, float* wide) {
    const int64_t acc_stride = rows * 16, depth_bytes = kBf16 ? pair_bytes(kLinearDepth) : kLinearDepth * 64;
    const int64_t depths = (a.k + kLinearDepth - 1) / kLinearDepth;
    const bool whole_depth = rows * a.k <= kNearFloats;
    const auto tile = [&](int64_t p, int64_t d) {
        const int64_t k0 = d * kLinearDepth, k = a.k - k0 < kLinearDepth ? a.k - k0 : kLinearDepth;
        const std::byte* w = weight + p * panel_bytes + d * depth_bytes;
        const int64_t ahead = whole_depth              ? depth_bytes
                              : p + kTileVecs < panels ? kTileVecs * panel_bytes
                                                       : depth_bytes - p * panel_bytes;
        const float* outputs = d + 1 == depths ? y + (a.gated ? p / 2 : p) * 16 : nullptr;
        if (panels - p >= kTileVecs) {
            linear_tile<kTileVecs, kBf16>(x + k0, a.x_stride, rows, w, panel_bytes, k, acc + p * acc_stride,
                                          acc_stride, d > 0, ahead, outputs, a.n, wide);
        } else {
            linear_tile<1, kBf16>(x + k0, a.x_stride, rows, w, panel_bytes, k, acc + p * acc_stride,
                                  acc_stride, d > 0, ahead, outputs, a.n, wide);
        }
    };
    if (whole_depth) {
        for (int64_t p = 0; p < panels; p += kTileVecs) {
            for (int64_t d = 0; d < depths; ++d) tile(p, d);
        }
    } else {
        for (int64_t d = 0; d < depths; ++d) {
            for (int64_t p = 0; p < panels; p += kTileVecs) tile(p, d);
        }
    }
}

static void linear(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t block_begin,
                   int64_t block_end, float* scratch) {
    const int64_t rows = row_end - row_begin;
    const int64_t per_block = a.gated ? 2 : 1;
    const int64_t panels = (block_end - block_begin) * per_block;
    const int64_t panel_bytes = a.bf16 ? pair_bytes(a.k) : a.k * 64;
    const std::byte* weight = a.weight + block_begin * per_block * panel_bytes;
    const float* x = a.x + row_begin * a.x_stride;
    const float* y = a.y + row_begin * a.n + block_begin * 16;
    float* wide = scratch;
    float* acc = scratch + kLinearWideFloats;
    if (a.bf16 && rows <= kPairTileRows) {
        with_rows<kPairTileRows>(rows, [&](auto r) {
            linear_stream<r.value, Weights::kPairs>(x, a.x_stride, weight, panel_bytes, panels, a.k, acc,
                                                    rows * 16);
        });
    } else if (a.bf16) {
        linear_tiled<true>(a, x, rows, weight, panel_bytes, panels, y, acc, wide);
    } else if (rows <= kTileRows) {
        with_rows<kTileRows>(rows, [&](auto r) {
            linear_stream<r.value, Weights::kFloat>(x, a.x_stride, weight, panel_bytes, panels, a.k, acc,
                                                    rows * 16);
        });
    } else {
        linear_tiled<false>(a, x, rows, weight, panel_bytes, panels, y, acc, wide);
    }
    linear_output(a, row_begin, row_end, block_begin, block_end, acc);
}
