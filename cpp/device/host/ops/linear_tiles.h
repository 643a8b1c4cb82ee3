// How the product of many rows is cut: shared by linear and quantized_linear.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/host/kernels/table.h"
#include "device/host/op.h"

namespace castiron::host {

// Sums of one call: [panels][rows][16].
inline constexpr size_t kLinearSumFloats = static_cast<size_t>(kMaxLinearRows * kMaxLinearBlocks * 2 * 16);

// Calls f(row_begin, row_end, block_begin, block_end) for this thread's part, kMaxLinearRows and
// kMaxLinearBlocks at most. height: rows that the kernel takes at once, so that cuts lie between them.
template <typename F>
void for_linear_tiles(const StepContext& context, const Lane& lane, int64_t rows, int64_t blocks,
                      int64_t height, F f) {
    constexpr int64_t kStreamRows = 6;
    if (rows <= kStreamRows) {
        // Weights stream from memory once: one contiguous run for each thread.
        const auto [begin, end] = lane.share(blocks);
        for (int64_t block = begin; block < end; block += kMaxLinearBlocks) {
            f(int64_t{0}, rows, block, std::min(block + kMaxLinearBlocks, end));
        }
        return;
    }
    // Tiles of rows x blocks, handed out as threads come; all row tiles are of about the same height.
    int64_t row_tiles = (rows + kMaxLinearRows - 1) / kMaxLinearRows;
    const int64_t chunk = std::clamp<int64_t>(blocks / (int64_t{lane.parts} * 8), 1, 4);
    const int64_t chunks = (blocks + chunk - 1) / chunk;
    while (row_tiles * chunks < int64_t{lane.parts} * 4 && rows / row_tiles > 24) ++row_tiles;
    const int64_t units = (rows + height - 1) / height;
    for (int64_t tile = context.next(); tile < row_tiles * chunks; tile = context.next()) {
        const int64_t row_tile = tile / chunks, block = tile % chunks * chunk;
        const int64_t begin = units * row_tile / row_tiles * height;
        const int64_t end = std::min(units * (row_tile + 1) / row_tiles * height, rows);
        if (begin < end) f(begin, end, block, std::min(block + chunk, blocks));
    }
}

}  // namespace castiron::host
