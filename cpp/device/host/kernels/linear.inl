// Matrix products over packed panels.
//
// Inputs are taken in blocks of kLinearDepth. Inside a block every output is one chain of fused multiply-adds
// over ascending k, from zero; the blocks are added in order. Short chains keep the rounding error near that
// of a pairwise sum, and since the borders are the same for any number of rows and any cut of k, a row's
// result never depends on its neighbours. The sums go through scratch (in cache), which costs about two
// percent and keeps one epilogue for all tiles.

// acc[v][r] (+)= sum over one block of k of x[r][k] * w[v][k]; acc rows are 16 floats, acc_stride floats
// between panels.
template <int R, int V, bool kBf16>
static void linear_block(const float* x, int64_t x_stride, const std::byte* weight, int64_t panel_bytes,
                         int64_t k, float* acc, int64_t acc_stride, bool resume) {
    Vec c[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) c[r][v] = zero();
    }
    if constexpr (kBf16) {
        const std::byte* w = weight;
        int64_t i = 0;
        for (; i + 2 <= k; i += 2, w += 64) {
            // Past the end it touches nothing. (In the loop over float32 below gcc spills every accumulator
            // for it.)
            for (int v = 0; v < V; ++v) prefetch(w + v * panel_bytes + 1024);
            Vec even[V];
            for (int v = 0; v < V; ++v)
                even[v] = load_pair_even(reinterpret_cast<const uint16_t*>(w + v * panel_bytes));
            for (int r = 0; r < R; ++r) {
                const Vec b = set1(x[r * x_stride + i]);
                for (int v = 0; v < V; ++v) c[r][v] = fma(b, even[v], c[r][v]);
            }
            Vec odd[V];
            for (int v = 0; v < V; ++v)
                odd[v] = load_pair_odd(reinterpret_cast<const uint16_t*>(w + v * panel_bytes));
            for (int r = 0; r < R; ++r) {
                const Vec b = set1(x[r * x_stride + i + 1]);
                for (int v = 0; v < V; ++v) c[r][v] = fma(b, odd[v], c[r][v]);
            }
        }
        if (i < k) {
            for (int v = 0; v < V; ++v) {
                const Vec even = load_pair_even(reinterpret_cast<const uint16_t*>(w + v * panel_bytes));
                for (int r = 0; r < R; ++r) c[r][v] = fma(set1(x[r * x_stride + i]), even, c[r][v]);
            }
        }
    } else {
        const std::byte* w = weight;
        for (int64_t i = 0; i < k; ++i, w += 64) {
            Vec b[V];
            for (int v = 0; v < V; ++v) b[v] = load(reinterpret_cast<const float*>(w + v * panel_bytes));
            for (int r = 0; r < R; ++r) {
                const Vec a = set1(x[r * x_stride + i]);
                for (int v = 0; v < V; ++v) c[r][v] = fma(a, b[v], c[r][v]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) {
            float* sum = acc + v * acc_stride + r * 16;
            store(sum, resume ? add(load(sum), c[r][v]) : c[r][v]);
        }
    }
}

template <int R, int V, bool kBf16>
static void linear_tile(const float* x, int64_t x_stride, const std::byte* weight, int64_t panel_bytes,
                        int64_t k, float* acc, int64_t acc_stride, bool resume) {
    for (int64_t k0 = 0; k0 < k; k0 += kLinearDepth) {
        linear_block<R, V, kBf16>(x + k0, x_stride, weight + (kBf16 ? k0 / 2 : k0) * 64, panel_bytes,
                                  k - k0 < kLinearDepth ? k - k0 : kLinearDepth, acc, acc_stride,
                                  resume || k0 > 0);
    }
}

// R rows of all `panels`, as many panels at once as registers allow, then in pairs, then alone.
template <int R, bool kBf16>
static void linear_rows(const float* x, int64_t x_stride, const std::byte* weight, int64_t panel_bytes,
                        int64_t panels, int64_t k, float* acc, int64_t acc_stride, bool resume) {
    constexpr int V = vecs_for(R);
    int64_t p = 0;
    for (; p + V <= panels; p += V) {
        linear_tile<R, V, kBf16>(x, x_stride, weight + p * panel_bytes, panel_bytes, k, acc + p * acc_stride,
                                 acc_stride, resume);
    }
    if constexpr (V > 2) {
        for (; p + 2 <= panels; p += 2) {
            linear_tile<R, 2, kBf16>(x, x_stride, weight + p * panel_bytes, panel_bytes, k,
                                     acc + p * acc_stride, acc_stride, resume);
        }
    }
    for (; p < panels; ++p) {
        linear_tile<R, 1, kBf16>(x, x_stride, weight + p * panel_bytes, panel_bytes, k, acc + p * acc_stride,
                                 acc_stride, resume);
    }
}

template <bool kBf16>
static void linear_rows_n(int rows, const float* x, int64_t x_stride, const std::byte* weight,
                          int64_t panel_bytes, int64_t panels, int64_t k, float* acc, int64_t acc_stride,
                          bool resume) {
    switch (rows) {
#define CASTIRON_ROWS(R) \
    case R:              \
        return linear_rows<R, kBf16>(x, x_stride, weight, panel_bytes, panels, k, acc, acc_stride, resume);
        CASTIRON_ROWS(1)
        CASTIRON_ROWS(2)
        CASTIRON_ROWS(3)
        CASTIRON_ROWS(4)
        CASTIRON_ROWS(5)
        CASTIRON_ROWS(6)
#if CASTIRON_TILE_ROWS > 6
        CASTIRON_ROWS(7)
        CASTIRON_ROWS(8)
        CASTIRON_ROWS(9)
        CASTIRON_ROWS(10)
        CASTIRON_ROWS(11)
        CASTIRON_ROWS(12)
#endif
#undef CASTIRON_ROWS
        default:
            __builtin_unreachable();
    }
}

static void linear_epilogue(const LinearArgs& a, int64_t row_begin, int64_t rows, int64_t block,
                            const float* acc, int64_t acc_stride) {
    const int64_t column = block * 16;
    const int lanes = a.n - column < 16 ? static_cast<int>(a.n - column) : 16;
    const Vec alpha = set1(a.alpha);
    Vec bias = zero(), up_bias = zero();
    if (a.bias != nullptr) {
        bias = a.gated ? load(a.bias + 2 * column) : load_n(a.bias + column, lanes);
        if (a.gated) up_bias = load(a.bias + 2 * column + 16);
    }
    for (int64_t r = 0; r < rows; ++r) {
        Vec v = load(acc + r * 16);
        if (a.bias != nullptr) v = add(v, bias);
        if (a.activation != Activation::kNone) v = activate(a.activation, v);
        if (a.gated) {
            Vec up = load(acc + acc_stride + r * 16);
            if (a.bias != nullptr) up = add(up, up_bias);
            v = mul(v, up);
        }
        const int64_t at = (row_begin + r) * a.n + column;
        if (a.alpha != 1.0f) v = mul(v, alpha);
        if (a.residual != nullptr) v = add(v, load_n(a.residual + at, lanes));
        store_n(a.y + at, v, lanes);
    }
}

// The rows of a call over a block of k, in row groups of equal height: 8 rows run as 4 + 4, not as 6 + 2.
template <bool kBf16>
static void linear_depth(const float* x, int64_t x_stride, int64_t rows, const std::byte* weight,
                         int64_t panel_bytes, int64_t panels, int64_t k, float* acc, int64_t acc_stride,
                         bool resume) {
    constexpr int64_t kRows = kBf16 ? kPairTileRows : kTileRows;
    const int64_t groups = (rows + kRows - 1) / kRows;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = rows * g / groups;
        const int64_t end = rows * (g + 1) / groups;
        linear_rows_n<kBf16>(static_cast<int>(end - begin), x + begin * x_stride, x_stride, weight,
                             panel_bytes, panels, k, acc + begin * 16, acc_stride, resume);
    }
}

// Up to here all of k runs at once, so that weights that come from memory come as one stream.
inline constexpr int64_t kWholeDepthRows = 32;

static void linear(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t block_begin,
                   int64_t block_end, float* scratch) {
    const int64_t rows = row_end - row_begin;
    const int64_t per_block = a.gated ? 2 : 1;
    const int64_t panels = (block_end - block_begin) * per_block;
    const int64_t panel_bytes = a.bf16 ? (a.k + 1) / 2 * 64 : a.k * 64;
    const std::byte* weight = a.weight + block_begin * per_block * panel_bytes;
    const float* x = a.x + row_begin * a.x_stride;
    const int64_t acc_stride = rows * 16;
    // One group of rows reads each weight once: no blocking of k. Several groups re-read it from cache.
    const bool stream = rows <= (a.bf16 ? kPairTileRows : kTileRows);
    // Few groups: a panel's whole depth in one go, as one stream from memory; it stays near for the next
    // group.
    const int64_t depth = rows <= kWholeDepthRows ? a.k : kLinearDepth;
    for (int64_t k0 = 0; k0 < a.k; k0 += depth) {
        const int64_t k = a.k - k0 < depth ? a.k - k0 : depth;
        const std::byte* w = weight + (a.bf16 ? k0 / 2 * 64 : k0 * 64);
        if (stream) {
            if (a.bf16) {
                linear_depth<true>(x + k0, a.x_stride, rows, w, panel_bytes, panels, k, scratch, acc_stride,
                                   k0 > 0);
            } else {
                linear_depth<false>(x + k0, a.x_stride, rows, w, panel_bytes, panels, k, scratch, acc_stride,
                                    k0 > 0);
            }
            continue;
        }
        for (int64_t p = 0; p < panels; p += kTileVecs) {
            const int64_t count = panels - p < kTileVecs ? panels - p : kTileVecs;
            float* acc = scratch + p * acc_stride;
            if (a.bf16) {
                linear_depth<true>(x + k0, a.x_stride, rows, w + p * panel_bytes, panel_bytes, count, k, acc,
                                   acc_stride, k0 > 0);
            } else {
                linear_depth<false>(x + k0, a.x_stride, rows, w + p * panel_bytes, panel_bytes, count, k, acc,
                                    acc_stride, k0 > 0);
            }
        }
    }
    for (int64_t block = block_begin; block < block_end; ++block) {
        linear_epilogue(a, row_begin, rows, block, scratch + (block - block_begin) * per_block * acc_stride,
                        acc_stride);
    }
}
