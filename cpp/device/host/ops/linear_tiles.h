// How the product of many rows is cut.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/host/kernels/table.h"
#include "device/host/op.h"

namespace castiron::host {

// Sums of one call: [panels][rows][16].
inline constexpr size_t kLinearSumFloats = static_cast<size_t>(kMaxLinearRows * kMaxLinearBlocks * 2 * 16);

// How a kernel takes rows, and what of its weights belongs together.
struct LinearShape {
    int64_t rows = 0;
    int64_t blocks = 0;
    int64_t panels_per_block = 1;
    int64_t height = 1;     // rows at once: cuts lie between them
    int64_t row_bytes = 0;  // of activations
};

// Rows [row_begin, row_end) of x, blocks [block_begin, block_end) of the weight.
struct LinearTile {
    int64_t row_begin = 0, row_end = 0;
    int64_t block_begin = 0, block_end = 0;
};

// Tiles of rows x blocks: `chunk` blocks at a time by one of `row_tiles` parts of the rows.
struct LinearTiles {
    int64_t row_tiles = 1;
    int64_t chunk = 1;
    bool rows_first = false;  // hand out all rows of a chunk before the next chunk

    [[nodiscard]] int64_t chunks(const LinearShape& shape) const {
        return (shape.blocks + chunk - 1) / chunk;
    }
    [[nodiscard]] int64_t count(const LinearShape& shape) const { return row_tiles * chunks(shape); }
    [[nodiscard]] int64_t first_block(const LinearShape& shape, int64_t tile) const {
        return (rows_first ? tile / row_tiles : tile % chunks(shape)) * chunk;
    }
    // Its rows may be none: there may be fewer units of rows than tiles.
    [[nodiscard]] LinearTile at(const LinearShape& shape, int64_t tile) const {
        const int64_t units = (shape.rows + shape.height - 1) / shape.height;
        const int64_t part = rows_first ? tile % row_tiles : tile / chunks(shape);
        const int64_t block = first_block(shape, tile);
        return {.row_begin = units * part / row_tiles * shape.height,
                .row_end = std::min(units * (part + 1) / row_tiles * shape.height, shape.rows),
                .block_begin = block,
                .block_end = std::min(block + chunk, shape.blocks)};
    }
};

// At most `most` rows in a tile, and fewer where that gives too few tiles for the threads, but not below
// `least`.
[[nodiscard]] inline LinearTiles cut_rows(const LinearShape& shape, int64_t parts, int64_t most,
                                          int64_t least, int64_t chunk) {
    LinearTiles t{.row_tiles = (shape.rows + most - 1) / most, .chunk = chunk};
    const int64_t chunks = (shape.blocks + chunk - 1) / chunk;
    while (t.row_tiles * chunks < parts * 4 && shape.rows / t.row_tiles > least) ++t.row_tiles;
    return t;
}

// Vectors: tiles of about the same height.
[[nodiscard]] inline LinearTiles vector_tiles(const LinearShape& shape, int64_t parts) {
    const int64_t chunk = std::clamp<int64_t>(shape.blocks / (parts * 8), 1, 4);
    return cut_rows(shape, parts, kMaxLinearRows, 24, chunk);
}

// A matrix unit is faster than memory brings weights: two panels at a time, for as many rows as stay in the
// second-level cache.
[[nodiscard]] inline LinearTiles matrix_tiles(const LinearShape& shape, int64_t parts) {
    constexpr int64_t kNearBytes = int64_t{1} << 20;
    const int64_t most = std::min(static_cast<int64_t>(kLinearSumFloats) / (2 * 16),
                                  std::max(kNearBytes / shape.row_bytes, kMaxLinearRows));
    LinearTiles t = cut_rows(shape, parts, most, 2 * shape.height, 2 / shape.panels_per_block);
    t.rows_first = true;
    return t;
}

// At most so many rows stream weights from memory once.
inline constexpr int64_t kStreamRows = 6;

[[nodiscard]] inline LinearTiles linear_tiles(const LinearShape& shape, int64_t parts) {
    if (shape.rows <= kStreamRows) {
        return {.chunk = std::clamp<int64_t>(shape.blocks / (parts * 2), 1, kMaxLinearBlocks)};
    }
    const bool matrix = shape.height > 1 && shape.rows > kMaxLinearRows;
    return matrix ? matrix_tiles(shape, parts) : vector_tiles(shape, parts);
}

// Calls f(LinearTile, WeightsAhead) for this thread's part; what a call covers has room in kLinearSumFloats.
template <typename F>
void for_linear_tiles(const StepContext& context, const Lane& lane, const LinearShape& shape, F f) {
    WeightsAhead ahead;
    if (shape.rows <= kStreamRows) {
        // One contiguous run of weights for each thread.
        const auto [begin, end] = lane.share(shape.blocks);
        for (int64_t block = begin; block < end; block += kMaxLinearBlocks) {
            const int64_t next = block + kMaxLinearBlocks;
            ahead.next_block = next < end ? next : -1;
            f(LinearTile{0, shape.rows, block, std::min(next, end)}, ahead);
            ahead.cold = false;
        }
        return;
    }
    const LinearTiles t = linear_tiles(shape, lane.parts);
    const int64_t tiles = t.count(shape);
    // Tiles are handed out as threads come, which is in turn where nothing disturbs them.
    for (int64_t tile = context.next(); tile < tiles; tile = context.next()) {
        const LinearTile part = t.at(shape, tile);
        const int64_t next = tile + lane.parts;
        const int64_t next_block = next < tiles ? t.first_block(shape, next) : part.block_begin;
        ahead.next_block = next_block != part.block_begin ? next_block : -1;
        if (part.row_begin < part.row_end) f(part, ahead);
        ahead.cold = false;
    }
}

}  // namespace castiron::host
