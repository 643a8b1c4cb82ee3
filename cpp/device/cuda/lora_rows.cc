#include "device/cuda/lora_rows.h"

#include <algorithm>
#include <tuple>

namespace castiron::cuda {

LoraRows::LoraRows(const Limits& limits) {
    const auto reserve = [&](LoraTiles& tiles, int rows) {
        const auto most = static_cast<size_t>(lora_tiles(rows, limits.max_batch_size));
        tiles.slots.reserve(most);
        tiles.rows.reserve(most * kLoraTile);
    };
    reserve(tokens_, limits.max_num_tokens);
    reserve(logits_, limits.max_logit_rows);
    runs_.reserve(static_cast<size_t>(limits.max_batch_size));
}

void LoraRows::set(const Batch& batch, std::span<const int32_t> slots) {
    for (LoraTiles* tiles : {&tokens_, &logits_}) {
        tiles->rows.clear();
        tiles->slots.clear();
    }
    if (slots.empty()) return;
    runs_.clear();
    for (size_t i = 0; i < slots.size(); ++i) {
        const SequenceSlice& sequence = batch.sequences[i];
        if (slots[i] >= 0) runs_.push_back({slots[i], sequence.first_row, sequence.num_rows});
    }
    fill(tokens_);
    // Rows of logits are in the order of the rows, and those in the order of the sequences.
    runs_.clear();
    auto next = batch.logit_rows.begin();
    for (size_t i = 0; i < slots.size(); ++i) {
        const SequenceSlice& sequence = batch.sequences[i];
        const auto first = next;
        while (next != batch.logit_rows.end() && *next < sequence.first_row + sequence.num_rows) ++next;
        if (slots[i] < 0 || next == first) continue;
        runs_.push_back({slots[i], static_cast<int32_t>(first - batch.logit_rows.begin()),
                         static_cast<int32_t>(next - first)});
    }
    fill(logits_);
}

void LoraRows::fill(LoraTiles& tiles) {
    std::sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) {
        return std::tie(a.slot, a.first) < std::tie(b.slot, b.first);
    });
    int32_t last = -1;
    for (const Run& run : runs_) {
        // Another adapter begins a tile of its own.
        while (run.slot != last && tiles.rows.size() % kLoraTile != 0) tiles.rows.push_back(-1);
        last = run.slot;
        for (int32_t row = run.first; row < run.first + run.count; ++row) {
            if (tiles.rows.size() % kLoraTile == 0) tiles.slots.push_back(run.slot);
            tiles.rows.push_back(row);
        }
    }
    while (tiles.rows.size() % kLoraTile != 0) tiles.rows.push_back(-1);
}

}  // namespace castiron::cuda
