// The matrix unit of AMX: eight tiles of up to sixteen rows of 64 bytes. Here tiles 0 to 3 are sums of rows
// by sixteen outputs, 4 and 5 rows of activations, 6 and 7 panels of weights, whose layouts (panel16x2,
// panel16x4) are tiles as they are. A row of a sum depends on its own row of activations alone.

inline constexpr int64_t kTileHeight = 16;

// Weights that come next, asked for into the second-level cache while those before them multiply: loads of
// tiles wait for memory one after the other, where those of vectors are foreseen. Several pairs of tiles of
// rows meet the same weights, and each asks for a share of every tile's lines.
struct TileFetch {
    const std::byte* next = nullptr;  // the same place in the next panels
    int64_t panel_bytes = 0;
    int64_t first_line = 0, last_line = 0;

    // Of `lines` lines in a tile, for pair `pair` of `pairs`. No next: nothing.
    static TileFetch share(const std::byte* next, int64_t panel_bytes, int64_t lines, int64_t pair,
                           int64_t pairs) {
        if (next == nullptr) return {};
        return {next, panel_bytes, lines * pair / pairs, lines * (pair + 1) / pairs};
    }
    // The lines of V panels' tiles that lie `at` bytes on.
    template <int V>
    CASTIRON_INLINE void ask(const TileFetch& f, int64_t at) {
        for (int64_t line = f.first_line; line < f.last_line; ++line) {
            unrolled<V>([&](auto v) CASTIRON_UNROLLED {
                prefetch_far(f.next + v.value * f.panel_bytes + at + line * 64);
            });
        }
    }
};

// Panels that nothing asked for before, all at once.
CASTIRON_INLINE void fetch_panels(const std::byte* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) prefetch_far(from + at);
}

struct __attribute__((packed)) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles for `first` rows and `second` more, over inputs of `depth_bytes` a row. All tiles become zero.
CASTIRON_INLINE void shape_tiles(int64_t first, int64_t second, int64_t depth_bytes) {
    TileShapes shapes;
    const auto set = [&](int tile, int64_t rows, int64_t bytes) {
        if (rows == 0) return;
        shapes.rows[tile] = static_cast<uint8_t>(rows);
        shapes.row_bytes[tile] = static_cast<uint16_t>(bytes);
    };
    set(0, first, 64);
    set(1, first, 64);
    set(2, second > 0 ? second : first, 64);
    set(3, second > 0 ? second : first, 64);
    set(4, first, depth_bytes);
    set(5, second, depth_bytes);
    set(6, depth_bytes / 4, 64);
    set(7, depth_bytes / 4, 64);
    // GCC's intrinsics name as read the first eight bytes of the shapes, and nothing of a tile: without this,
    // what was written to either could be left out, or come later.
    __asm__ volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

CASTIRON_INLINE void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Calls f(begin, how many) for rows in pairs of tiles, with the tiles shaped for them.
template <typename F>
CASTIRON_INLINE void for_tile_pairs(int64_t rows, int64_t depth_bytes, F f) {
    int64_t shaped = -1;
    for (int64_t begin = 0; begin < rows; begin += 2 * kTileHeight) {
        const int64_t here = rows - begin < 2 * kTileHeight ? rows - begin : 2 * kTileHeight;
        if (here != shaped) {
            shape_tiles(here < kTileHeight ? here : kTileHeight, here > kTileHeight ? here - kTileHeight : 0,
                        depth_bytes);
            shaped = here;
        }
        f(begin, here);
    }
}

// Sums (tiles 0 to 3) += x · weights, both bf16: two tiles of rows, or one, `stride` bytes between rows, by V
// tiles of weights, `line` bytes between their lines.
template <int kHigh, int V>
CASTIRON_INLINE void multiply_bf16(const std::byte* x, int64_t stride, const std::byte* left,
                                   const std::byte* right, int64_t line) {
    const auto rows = static_cast<long>(stride), lines = static_cast<long>(line);
    _tile_loadd(4, x, rows);
    _tile_loadd(6, left, lines);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (V > 1) {
        _tile_loadd(7, right, lines);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kHigh > 1) {
        _tile_loadd(5, x + kTileHeight * stride, rows);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (V > 1) _tile_dpbf16ps(3, 5, 7);
    }
}

// Stores these sums, numbers of four bytes: `stride` of them between rows, `panel` between the V panels.
template <int kHigh, int V, typename T>
CASTIRON_INLINE void store_sums(T* to, int64_t panel, int64_t stride) {
    const auto bytes = static_cast<long>(stride * 4);
    _tile_stored(0, to, bytes);
    if constexpr (V > 1) _tile_stored(1, to + panel, bytes);
    if constexpr (kHigh > 1) {
        T* below = to + kTileHeight * stride;
        _tile_stored(2, below, bytes);
        if constexpr (V > 1) _tile_stored(3, below + panel, bytes);
    }
}
