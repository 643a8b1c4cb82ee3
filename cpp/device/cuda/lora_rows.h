// Which rows of a step have adapters, in tiles of rows of one adapter each (docs/cuda-program.md,
// "Adapters").
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"
#include "program/program.h"

namespace castiron::cuda {

inline constexpr int32_t kLoraTile = 16;  // rows

// Tiles that the rows of so many different adapters fill at most: each leaves one tile unfilled.
[[nodiscard]] inline int32_t lora_tiles(int64_t rows, int64_t adapters) {
    const int64_t apart = adapters < rows ? adapters : rows;
    return static_cast<int32_t>((rows + (kLoraTile - 1) * apart) / kLoraTile);
}

struct LoraTiles {
    std::vector<int32_t> rows;   // kLoraTile of each tile, -1 behind its last one
    std::vector<int32_t> slots;  // of each tile
};

class LoraRows {
public:
    LoraRows() = default;
    explicit LoraRows(const Limits& limits);

    // slots: of each sequence, -1 where it has no adapter; or empty.
    void set(const Batch& batch, std::span<const int32_t> slots);

    [[nodiscard]] bool empty() const { return tokens_.slots.empty(); }
    [[nodiscard]] const LoraTiles& tokens() const { return tokens_; }
    [[nodiscard]] const LoraTiles& logits() const { return logits_; }  // of rows of logits

private:
    struct Run {
        int32_t slot = 0;
        int32_t first = 0;
        int32_t count = 0;
    };

    void fill(LoraTiles& tiles);  // with runs_

    LoraTiles tokens_;
    LoraTiles logits_;
    std::vector<Run> runs_;
};

}  // namespace castiron::cuda
