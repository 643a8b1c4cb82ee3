// Sums of rows by packed panels: acc[panel][row][16].
//
// Inputs are taken in blocks of kLinearDepth. Inside a block every output is one chain of fused multiply-adds
// over ascending k, from zero; the blocks are added in order. Short chains keep the rounding error near that
// of a pairwise sum, and since the borders are the same for any number of rows and any cut of k, a row's
// result never depends on its neighbours. The sums go through scratch (in cache), which costs about two
// percent and keeps one epilogue for all tiles.
//
// Few rows: the weights come from memory and every byte is used once (stream). More rows: each block of
// weights serves several groups of rows (product_tiles); where weights are widened, the first group leaves
// them behind as float32 in scratch for the others, whose loop then is multiply-adds and loads alone.

// Bytes between what a stream reads and what it prefetches.
inline constexpr int64_t kStreamAhead = 1024;
// Inputs of a call that stay in the second-level cache: all of k runs for one panel before the next, so that
// weights come as one stream. With more, a block of k runs for all panels.
inline constexpr int64_t kNearFloats = int64_t{64} << 10;

// The forms of inputs and weights. A line is sixteen outputs' weights of one input of four bytes.
// panel16 and rows of float32.
struct FloatForm {
    static constexpr bool kPaired = false, kKept = false;
    static constexpr int kNumbers = 1;  // of an input
    static constexpr int kStreamRows = kTileRows;
    CASTIRON_INLINE Vec multiply_add(Vec a, Vec w, Vec c) { return fma(a, w, c); }
};
// panel16x2 and rows of float32: a line holds two inputs' weights of bf16, widened here.
struct PairForm : FloatForm {
    static constexpr bool kPaired = true;
    static constexpr int kStreamRows = kPairTileRows;
};
// The same, left as panel16 in `wide` as well.
struct KeptPairForm : PairForm {
    static constexpr bool kKept = true;
};

// What a tile asks for meanwhile: so many bytes of each panel for every line it takes. With every second line
// left to the processor to foresee, memory and sums took turns. Nothing is read, so it may point past the
// end.
struct Fetch {
    const std::byte* next = nullptr;
    int64_t panel_bytes = 0;
    int64_t step = 0;
};

// acc[v][r] (+)= sum over one block of k of x[r][k] * w[v][k]; acc rows are 16 floats, acc_stride floats
// between panels. wide: [V][kLinearDepth][16].
template <int R, int V, typename Form>
CASTIRON_KERNEL void product_block(const float* x, int64_t x_stride, const std::byte* weight,
                                   int64_t panel_bytes, int64_t k, float* acc, int64_t acc_stride,
                                   bool resume, Fetch fetch, float* wide) {
    Vec c[R][V], w[V];
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED { c[r.value][v.value] = zero(); });
    // One input of all rows times w.
    const auto multiply_add = [&](int64_t i) CASTIRON_UNROLLED {
        unrolled<R>([&](auto r) CASTIRON_UNROLLED {
            const Vec a = set1(x[r.value * x_stride + i]);
            unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                c[r.value][v.value] = Form::multiply_add(a, w[v.value], c[r.value][v.value]);
            });
        });
    };
    const auto take_line = [&](int64_t i) CASTIRON_UNROLLED {
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            w[v.value] = load(reinterpret_cast<const float*>(weight + v.value * panel_bytes) + i * 16);
        });
    };
    const auto take_pair = [&](int64_t i, bool odd) CASTIRON_UNROLLED {
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            const auto* pair = reinterpret_cast<const uint16_t*>(weight + v.value * panel_bytes) + i * 16;
            w[v.value] = odd ? load_pair_odd(pair) : load_pair_even(pair);
            if constexpr (Form::kKept) store(wide + (v.value * kLinearDepth + i + odd) * 16, w[v.value]);
        });
    };
    const auto ask = [&]() CASTIRON_UNROLLED {
        unrolled<V>([&](auto v) CASTIRON_UNROLLED { prefetch(fetch.next + v.value * fetch.panel_bytes); });
        fetch.next += fetch.step;
    };
    int64_t i = 0;
    for (; i + 2 <= k; i += 2) {
        ask();
        if constexpr (Form::kPaired) {
            take_pair(i, false);
            multiply_add(i);
            take_pair(i, true);
        } else {
            take_line(i);
            multiply_add(i);
            ask();
            take_line(i + 1);
        }
        multiply_add(i + 1);
    }
    if (i < k) {
        Form::kPaired ? take_pair(i, false) : take_line(i);
        multiply_add(i);
    }
    unrolled<R, V>([&](auto r, auto v) CASTIRON_UNROLLED {
        float* sum = acc + v.value * acc_stride + r.value * 16;
        store(sum, resume ? add(load(sum), c[r.value][v.value]) : c[r.value][v.value]);
    });
}

// One call: rows by panels. behind: the weights that are wanted after it, or null. y: the outputs of the
// first row and panel, asked for while the last block of k runs; or null.
struct Product {
    const float* x = nullptr;
    int64_t x_stride = 0;  // inputs
    int64_t rows = 0;
    const std::byte* weight = nullptr;
    int64_t panels = 0;
    int64_t k = 0;  // inputs of four bytes, or of PairForm
    const std::byte* behind = nullptr;
    const float* y = nullptr;
    int64_t y_stride = 0;
    int64_t panels_per_output = 1;
};

// Of k inputs of a panel.
template <typename Form>
CASTIRON_INLINE int64_t panel_bytes(int64_t k) {
    return (Form::kPaired ? (k + 1) / 2 : k) * 64;
}

// The weights behind `panel`, or behind all of them.
template <typename Form>
static const std::byte* weights_at(const Product& p, int64_t panel) {
    return panel >= p.panels && p.behind != nullptr ? p.behind : p.weight + panel * panel_bytes<Form>(p.k);
}

// All of k for R rows of V panels: as many streams from memory as panels.
template <int R, int V, typename Form>
static void stream_tile(const Product& p, int64_t panel, float* acc) {
    const int64_t bytes = panel_bytes<Form>(p.k), acc_stride = R * 16;
    for (int64_t k0 = 0; k0 < p.k; k0 += kLinearDepth) {
        const std::byte* w = p.weight + panel * bytes + panel_bytes<Form>(k0);
        const Fetch fetch{w + kStreamAhead, bytes, 64};
        product_block<R, V, Form>(p.x + k0, p.x_stride, w, bytes,
                                  p.k - k0 < kLinearDepth ? p.k - k0 : kLinearDepth, acc + panel * acc_stride,
                                  acc_stride, k0 > 0, fetch, nullptr);
    }
}

// R rows of all panels, as many panels at once as registers allow, then in pairs, then alone.
template <int R, typename Form>
static void stream(const Product& p, float* acc) {
    constexpr int V = vecs_for(R);
    int64_t panel = 0;
    for (; panel + V <= p.panels; panel += V) stream_tile<R, V, Form>(p, panel, acc);
    if constexpr (V > 2) {
        for (; panel + 2 <= p.panels; panel += 2) stream_tile<R, 2, Form>(p, panel, acc);
    }
    for (; panel < p.panels; ++panel) stream_tile<R, 1, Form>(p, panel, acc);
}

// A block of k of some panels.
struct PanelBlock {
    int64_t panel = 0;
    int64_t k0 = 0;
};

CASTIRON_INLINE int64_t depth_at(const Product& p, int64_t k0) {
    return p.k - k0 < kLinearDepth ? p.k - k0 : kLinearDepth;
}

// One block of V panels for all rows, in groups of nearly equal height, of which each asks for a share of the
// block that comes next. y: as in Product, or null.
template <int V, typename Form>
static void product_tile(const Product& p, PanelBlock block, PanelBlock next, float* acc, const float* y,
                         float* wide) {
    int64_t bytes = panel_bytes<Form>(p.k);
    const std::byte* weight = weights_at<Form>(p, block.panel) + panel_bytes<Form>(block.k0);
    const float* x = p.x + block.k0;
    const int64_t k = depth_at(p, block.k0), acc_stride = p.rows * 16;
    const bool resume = block.k0 > 0;
    acc += block.panel * acc_stride;
    int64_t first = 0;
    if constexpr (Form::kPaired) first = p.rows < 2 * kPairTileRows ? (p.rows + 1) / 2 : kPairTileRows;
    const int64_t rest = p.rows - first, groups = (rest + kTileRows - 1) / kTileRows;
    // Times that something is asked for: for each line that is taken, of which some hold two inputs.
    const int64_t asks = groups * k + (Form::kPaired ? (k + 1) / 2 : 0);
    Fetch fetch{weights_at<Form>(p, next.panel) + panel_bytes<Form>(next.k0), bytes};
    fetch.step = (panel_bytes<Form>(depth_at(p, next.k0)) + asks - 1) / asks;
    const auto enter = [&](int64_t begin, int64_t end) {
        if (y == nullptr) return;
        for (int64_t r = begin; r < end; ++r) prefetch(y + r * p.y_stride);
    };
    if constexpr (Form::kPaired) {
        enter(0, first);
        with_rows<kPairTileRows>(first, [&](auto r) {
            product_block<r.value, V, KeptPairForm>(x, p.x_stride, weight, bytes, k, acc, acc_stride, resume,
                                                    fetch, wide);
        });
        weight = reinterpret_cast<const std::byte*>(wide);
        bytes = kLinearDepth * 64;
        fetch.next += k / 2 * fetch.step;
    }
    using Rest = std::conditional_t<Form::kPaired, FloatForm, Form>;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = first + rest * g / groups, end = first + rest * (g + 1) / groups;
        enter(begin, end);
        with_rows<kTileRows>(end - begin, [&](auto r) {
            product_block<r.value, V, Rest>(x + begin * p.x_stride, p.x_stride, weight, bytes, k,
                                            acc + begin * 16, acc_stride, resume, fetch, nullptr);
        });
        fetch.next += k * fetch.step;
    }
}

// All panels for many rows.
template <typename Form>
static void product_tiles(const Product& p, float* acc, float* wide) {
    const auto tile = [&](PanelBlock block, PanelBlock next) {
        const bool last = block.k0 + kLinearDepth >= p.k && p.y != nullptr;
        const float* y = last ? p.y + block.panel / p.panels_per_output * 16 : nullptr;
        if (p.panels - block.panel >= kTileVecs) {
            product_tile<kTileVecs, Form>(p, block, next, acc, y, wide);
        } else {
            product_tile<1, Form>(p, block, next, acc, y, wide);
        }
    };
    if (p.rows * p.k <= kNearFloats) {
        for (int64_t panel = 0; panel < p.panels; panel += kTileVecs) {
            for (int64_t k0 = 0; k0 < p.k; k0 += kLinearDepth) {
                const int64_t next_k0 = k0 + kLinearDepth;
                tile({panel, k0},
                     next_k0 < p.k ? PanelBlock{panel, next_k0} : PanelBlock{panel + kTileVecs, 0});
            }
        }
        return;
    }
    for (int64_t k0 = 0; k0 < p.k; k0 += kLinearDepth) {
        const int64_t next_k0 = k0 + kLinearDepth;
        const PanelBlock turn = next_k0 < p.k ? PanelBlock{0, next_k0} : PanelBlock{p.panels, 0};
        for (int64_t panel = 0; panel < p.panels; panel += kTileVecs) {
            const int64_t next = panel + kTileVecs;
            tile({panel, k0}, next < p.panels ? PanelBlock{next, k0} : turn);
        }
    }
}

// wide: kLinearWideFloats of scratch, where weights are widened.
template <typename Form>
static void product(const Product& p, float* acc, float* wide) {
    if (p.rows <= Form::kStreamRows) {
        with_rows<Form::kStreamRows>(p.rows, [&](auto r) { stream<r.value, Form>(p, acc); });
    } else {
        product_tiles<Form>(p, acc, wide);
    }
}
