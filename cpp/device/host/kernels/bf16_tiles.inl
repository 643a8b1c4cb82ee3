// Products of activations and weights that are both bf16, by AMX. Of each 32 inputs the even and the odd ones
// are two chains of fused multiply-adds in float32; their sum joins that of the inputs before, in ascending
// order. Numbers below the smallest normal one count as zero. One row does by AVX-512 what the tiles do, bit
// for bit, because it waits for memory alone and loads of tiles ask for less of it at a time.

// Inputs of a tile.
inline constexpr int64_t kBf16Depth = 32;

// Panels as tiles of inputs: the last one, where k is not a multiple, is a copy with zeros behind, because
// what follows in memory may be anything.
struct Bf16Panels {
    const std::byte* weight = nullptr;
    int64_t panel_bytes = 0;
    int64_t whole = 0;                // tiles
    const std::byte* last = nullptr;  // [panels][1024], or null
};

// V panels from `panel` on for two tiles of rows, or for one.
template <int kHigh, int V>
CASTIRON_KERNEL void bf16_block(const Bf16Panels& p, int64_t panel, const std::byte* x, int64_t x_stride,
                                float* acc, int64_t acc_stride, const TileFetch& fetch) {
    const std::byte* w = p.weight + panel * p.panel_bytes;
    clear_sums();
    for (int64_t i = 0; i < p.whole; ++i) {
        TileFetch::ask<V>(fetch, i * 1024);
        multiply_bf16<kHigh, V>(x, x_stride, w, w + p.panel_bytes, 64);
        x += 64;
        w += 1024;
    }
    if (p.last != nullptr) {
        const std::byte* last = p.last + panel * 1024;
        multiply_bf16<kHigh, V>(x, x_stride, last, last + 1024, 64);
    }
    store_sums<kHigh, V>(acc, acc_stride, 16);
}

// One tile of rows by four panels: weights come from memory, and four sums hide the latency of each other.
CASTIRON_KERNEL void bf16_stream(const Bf16Panels& p, int64_t panel, const std::byte* x, int64_t x_stride,
                                 float* acc, int64_t acc_stride, const TileFetch& fetch) {
    const std::byte* w = p.weight + panel * p.panel_bytes;
    const auto stride = static_cast<long>(x_stride);
    const auto step = [&](const std::byte* from, int64_t between) CASTIRON_UNROLLED {
        _tile_loadd(4, x, stride);
        _tile_loadd(6, from, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, from + between, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, from + 2 * between, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, from + 3 * between, 64);
        _tile_dpbf16ps(3, 4, 7);
        x += 64;
    };
    clear_sums();
    for (int64_t i = 0; i < p.whole; ++i) {
        TileFetch::ask<4>(fetch, i * 1024);
        step(w, p.panel_bytes);
        w += 1024;
    }
    if (p.last != nullptr) step(p.last + panel * 1024, 1024);
    _tile_stored(0, acc, 64);
    _tile_stored(1, acc + acc_stride, 64);
    _tile_stored(2, acc + 2 * acc_stride, 64);
    _tile_stored(3, acc + 3 * acc_stride, 64);
}

// Numbers below the smallest normal one are zero, as for tiles, while this lives.
class FlushedToZero {
public:
    FlushedToZero() { _mm_setcsr(before_ | 0x8040); }
    ~FlushedToZero() { _mm_setcsr(before_); }
    FlushedToZero(const FlushedToZero&) = delete;
    FlushedToZero& operator=(const FlushedToZero&) = delete;

private:
    unsigned before_ = _mm_getcsr();
};

// Bytes between the weights of one row that are read and those that are asked for.
inline constexpr int64_t kRowAhead = 2048;

// One row by V panels.
template <int V>
CASTIRON_KERNEL void bf16_row(const Bf16Panels& p, int64_t panel, const std::byte* x, float* acc) {
    const std::byte* w = p.weight + panel * p.panel_bytes;
    Vec sums[V];
    unrolled<V>([&](auto v) CASTIRON_UNROLLED { sums[v.value] = zero(); });
    const auto step = [&](const std::byte* from, int64_t between) CASTIRON_UNROLLED {
        Vec even[V], odd[V];
        unrolled<V>([&](auto v) CASTIRON_UNROLLED { even[v.value] = odd[v.value] = zero(); });
        for (int64_t pair = 0; pair < 16; ++pair) {
            const __m512i inputs = load_quad(x + pair * 4).v;  // two of bf16, for all lanes
            const Vec first = {_mm512_castsi512_ps(_mm512_slli_epi32(inputs, 16))};
            const Vec second = {_mm512_castsi512_ps(
                _mm512_and_si512(inputs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
            unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                const std::byte* line = from + v.value * between + pair * 64;
                prefetch(line + kRowAhead);
                const auto* weights = reinterpret_cast<const uint16_t*>(line);
                even[v.value] = fma(first, load_pair_even(weights), even[v.value]);
                odd[v.value] = fma(second, load_pair_odd(weights), odd[v.value]);
            });
        }
        unrolled<V>([&](auto v) CASTIRON_UNROLLED {
            sums[v.value] = add(sums[v.value], add(even[v.value], odd[v.value]));
        });
        x += 64;
    };
    for (int64_t i = 0; i < p.whole; ++i) {
        step(w, p.panel_bytes);
        w += 1024;
    }
    if (p.last != nullptr) step(p.last + panel * 1024, 1024);
    unrolled<V>([&](auto v) CASTIRON_UNROLLED { store(acc + v.value * 16, sums[v.value]); });
}

// Many rows: panels in pairs by tiles of rows in pairs.
static void bf16_tiles(const Bf16Panels& p, const std::byte* x, int64_t x_stride, int64_t rows, int64_t panel,
                       int64_t panels, float* acc, const std::byte* behind) {
    const int64_t acc_stride = rows * 16, pairs = (rows + 2 * kTileHeight - 1) / (2 * kTileHeight);
    for (; panel < panels; panel += 2) {
        const bool two = panel + 2 <= panels;
        const std::byte* next = panel + 2 < panels ? p.weight + (panel + 2) * p.panel_bytes : behind;
        for_tile_pairs(rows, 64, [&](int64_t begin, int64_t here) {
            const std::byte* from = x + begin * x_stride;
            float* to = acc + panel * acc_stride + begin * 16;
            const TileFetch fetch =
                TileFetch::share(next, p.panel_bytes, 16, begin / (2 * kTileHeight), pairs);
            const auto run = [&](auto high, auto v) {
                bf16_block<high.value, v.value>(p, panel, from, x_stride, to, acc_stride, fetch);
            };
            if (here > kTileHeight) {
                two ? run(Int<2>{}, Int<2>{}) : run(Int<2>{}, Int<1>{});
            } else {
                two ? run(Int<1>{}, Int<2>{}) : run(Int<1>{}, Int<1>{});
            }
        });
    }
}

static void bf16_product(const Bf16Args& a, int64_t row_begin, int64_t row_end, int64_t block_begin,
                         int64_t block_end, float* acc, const WeightsAhead& ahead) {
    const int64_t rows = row_end - row_begin, per_block = a.gated ? 2 : 1;
    const int64_t panels = (block_end - block_begin) * per_block, acc_stride = rows * 16;
    const std::byte* x = a.x + row_begin * a.x_stride;
    Bf16Panels p;
    p.panel_bytes = (a.k + 1) / 2 * 64;
    const auto block = [&](int64_t index) { return a.weight + index * per_block * p.panel_bytes; };
    p.weight = block(block_begin);
    p.whole = a.k / kBf16Depth;
    alignas(64) std::byte last[kMaxLinearBlocks * 2 * 1024];
    if (a.k % kBf16Depth != 0) {
        const int64_t bytes = p.panel_bytes - p.whole * 1024;
        for (int64_t v = 0; v < panels; ++v) {
            __builtin_memset(last + v * 1024, 0, 1024);
            __builtin_memcpy(last + v * 1024, p.weight + v * p.panel_bytes + p.whole * 1024,
                             static_cast<size_t>(bytes));
        }
        p.last = last;
    }
    int64_t panel = 0;
    if (rows == 1) {
        const FlushedToZero mode;
        for (; panel + 4 <= panels; panel += 4) bf16_row<4>(p, panel, x, acc + panel * 16);
        for (; panel < panels; ++panel) bf16_row<1>(p, panel, x, acc + panel * 16);
        return;
    }
    const std::byte* behind = ahead.next_block < 0 ? nullptr : block(ahead.next_block);
    const int64_t together = rows <= kTileHeight && panels >= 4 ? 4 : 2;
    if (ahead.cold) fetch_panels(p.weight, (panels < together ? panels : together) * p.panel_bytes);
    if (rows <= kTileHeight) {
        shape_tiles(rows, 0, 64);
        for (; panel + 4 <= panels; panel += 4) {
            const std::byte* next = panel + 4 < panels ? p.weight + (panel + 4) * p.panel_bytes : behind;
            bf16_stream(p, panel, x, a.x_stride, acc + panel * acc_stride, acc_stride,
                        TileFetch::share(next, p.panel_bytes, 16, 0, 1));
        }
    }
    bf16_tiles(p, x, a.x_stride, rows, panel, panels, acc, behind);
    _tile_release();
}
