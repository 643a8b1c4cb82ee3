#include "kv/beam_tables.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace castiron {

BeamTables::BeamTables(int width, int prompt_tokens, int64_t max_tokens)
    : width_(width),
      prompt_tokens_(prompt_tokens),
      shared_(prompt_tokens / kBlockTokens),
      max_blocks_(blocks_for_tokens(max_tokens)),
      tables_(static_cast<size_t>(width)),
      next_(static_cast<size_t>(width)),
      windows_(static_cast<size_t>(width)),
      heirs_(static_cast<size_t>(width)) {
    for (auto* tables : {&tables_, &next_, &windows_}) {
        for (auto& table : *tables) table.reserve(static_cast<size_t>(max_blocks_));
    }
    copies_.reserve(static_cast<size_t>(width));
}

bool BeamTables::reserve(BlockPool& pool) {
    if (!pool.promise(max_blocks())) return false;
    if (pool.windows() != nullptr && !pool.windows()->promise(max_blocks())) {
        pool.withdraw(max_blocks());
        return false;
    }
    promised_ = max_blocks();
    promised_windows_ = pool.windows() != nullptr ? max_blocks() : 0;
    return true;
}

int32_t BeamTables::take(BlockPool& pool) {
    if (promised_ < 1) throw std::logic_error("the beams of a request grew past the KV blocks promised");
    --promised_;
    const int32_t block = pool.take_promised();
    if (promised_windows_ > 0) static_cast<void>(pool.take_window(block));
    return block;
}

void BeamTables::let_go(BlockPool& pool, int32_t block) {
    if (promised_windows_ > 0) pool.end_window(block);
    pool.release(block);
}

// After the tables changed.
void BeamTables::name_windows(const BlockPool& pool) {
    if (promised_windows_ == 0) return;
    for (int beam = 0; beam < live_; ++beam) {
        auto& windows = windows_[static_cast<size_t>(beam)];
        windows.clear();
        for (const int32_t block : blocks(beam)) windows.push_back(pool.window_of(block));
    }
}

void BeamTables::release(BlockPool& pool, int32_t block) {
    const bool last = pool.references(block) == 1;
    let_go(pool, block);
    if (!last) return;
    if (!pool.promise(1)) throw std::logic_error("a KV block that a beam gave back is not available");
    ++promised_;
}

void BeamTables::branch(BlockPool& pool, std::span<const int32_t> prompt_blocks, int live) {
    copies_.clear();
    live_ = live;
    branched_ = true;
    for (int beam = 0; beam < live; ++beam) {
        auto& table = tables_[static_cast<size_t>(beam)];
        table.assign(prompt_blocks.begin(), prompt_blocks.begin() + shared_);
        if (prompt_tokens_ % kBlockTokens == 0) continue;
        table.push_back(take(pool));
        copies_.push_back({prompt_blocks[static_cast<size_t>(shared_)], table.back()});
    }
    name_windows(pool);
}

void BeamTables::reorder(BlockPool& pool, std::span<const int> parents, int computed) {
    copies_.clear();
    const auto own = static_cast<size_t>(shared_);
    const auto full = static_cast<size_t>(computed / kBlockTokens);
    std::fill(heirs_.begin(), heirs_.end(), -1);
    for (size_t beam = parents.size(); beam-- > 0;) {
        heirs_[static_cast<size_t>(parents[beam])] = static_cast<int>(beam);
    }
    // First what nobody continues, so that its blocks are there for the copies.
    for (int beam = 0; beam < live_; ++beam) {
        if (heirs_[static_cast<size_t>(beam)] >= 0) continue;
        auto& table = tables_[static_cast<size_t>(beam)];
        for (size_t i = table.size(); i-- > own;) release(pool, table[i]);
    }
    for (size_t beam = 0; beam < parents.size(); ++beam) {
        const auto parent = static_cast<size_t>(parents[beam]);
        auto& table = next_[beam];
        table.assign(tables_[parent].begin(), tables_[parent].end());
        if (heirs_[parent] == static_cast<int>(beam)) continue;  // it inherits what its parent held
        for (size_t i = own; i < table.size(); ++i) {
            if (i < full) {
                pool.retain(table[i]);
                if (promised_windows_ > 0) pool.read_window(table[i]);
            } else {
                copies_.push_back({table[i], take(pool)});
                table[i] = copies_.back().to;
            }
        }
    }
    tables_.swap(next_);
    live_ = static_cast<int>(parents.size());
    name_windows(pool);
}

void BeamTables::grow(BlockPool& pool, int64_t tokens) {
    const auto wanted = static_cast<size_t>(blocks_for_tokens(tokens));
    for (int beam = 0; beam < live_; ++beam) {
        auto& table = tables_[static_cast<size_t>(beam)];
        while (table.size() < wanted) {
            table.push_back(take(pool));
            if (promised_windows_ > 0)
                windows_[static_cast<size_t>(beam)].push_back(pool.window_of(table.back()));
        }
    }
}

void BeamTables::close(BlockPool& pool) {
    for (int beam = 0; beam < live_; ++beam) {
        auto& table = tables_[static_cast<size_t>(beam)];
        for (size_t i = table.size(); i-- > static_cast<size_t>(shared_);) let_go(pool, table[i]);
        table.clear();
    }
    live_ = 0;
    pool.withdraw(std::exchange(promised_, 0));
    if (promised_windows_ > 0) pool.windows()->withdraw(std::exchange(promised_windows_, 0));
}

}  // namespace castiron
