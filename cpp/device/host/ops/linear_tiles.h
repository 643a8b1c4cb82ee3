// How the product of many rows is cut: shared by linear and quantized_linear.
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

// Tiles of rows x blocks: `chunk` blocks at a time by one of `row_tiles` parts of the rows.
struct LinearTiles {
    int64_t row_tiles = 1;
    int64_t chunk = 1;
    bool rows_first = false;  // hand out all rows of a chunk before the next chunk
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

// Calls f(row_begin, row_end, block_begin, block_end, WeightsAhead) for this thread's part; what a call
// covers has room in kLinearSumFloats.
template <typename F>
void for_linear_tiles(const StepContext& context, const Lane& lane, const LinearShape& shape, F f) {
    constexpr int64_t kStreamRows = 6;
    WeightsAhead ahead;
    if (shape.rows <= kStreamRows) {
        // Weights stream from memory once: one contiguous run for each thread.
        const auto [begin, end] = lane.share(shape.blocks);
        for (int64_t block = begin; block < end; block += kMaxLinearBlocks) {
            const int64_t next = block + kMaxLinearBlocks;
            ahead.next_block = next < end ? next : -1;
            f(int64_t{0}, shape.rows, block, std::min(next, end), ahead);
            ahead.cold = false;
        }
        return;
    }
    const bool matrix = shape.height > 1 && shape.rows > kMaxLinearRows;
    const LinearTiles t = matrix ? matrix_tiles(shape, lane.parts) : vector_tiles(shape, lane.parts);
    const int64_t chunks = (shape.blocks + t.chunk - 1) / t.chunk, tiles = t.row_tiles * chunks;
    const int64_t units = (shape.rows + shape.height - 1) / shape.height;
    const auto first_block = [&](int64_t tile) {
        return (t.rows_first ? tile / t.row_tiles : tile % chunks) * t.chunk;
    };
    // Tiles are handed out as threads come, which is in turn where nothing disturbs them.
    for (int64_t tile = context.next(); tile < tiles; tile = context.next()) {
        const int64_t row_tile = t.rows_first ? tile % t.row_tiles : tile / chunks;
        const int64_t block = first_block(tile), next = tile + lane.parts;
        const int64_t begin = units * row_tile / t.row_tiles * shape.height;
        const int64_t end = std::min(units * (row_tile + 1) / t.row_tiles * shape.height, shape.rows);
        ahead.next_block = next < tiles && first_block(next) != block ? first_block(next) : -1;
        if (begin < end) f(begin, end, block, std::min(block + t.chunk, shape.blocks), ahead);
        ahead.cold = false;
    }
}

}  // namespace castiron::host
