// The KV blocks of the beams of one request.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/block_pool.h"
#include "kv/block_table.h"

namespace castiron {

// The prompt's full blocks are held by its BlockTable and used by all beams; behind them every beam has a
// table of its own. Beams share blocks that are full; when several continue the same beam, the block that is
// being filled is copied for all of them but one. Every block that the beams can ever need is promised from
// reserve() on: what they hold and what is promised to them are always the same number together.
//
// All memory is taken by the constructor.
class BeamTables {
public:
    // max_tokens: cached tokens of one beam, the prompt's among them.
    BeamTables(int width, int prompt_tokens, int64_t max_tokens);

    // Blocks that `width` beams need besides those of the prompt's table.
    [[nodiscard]] static constexpr int blocks_for(int width, int prompt_tokens, int64_t max_tokens) {
        return width * (blocks_for_tokens(max_tokens) - prompt_tokens / kBlockTokens);
    }
    [[nodiscard]] int max_blocks() const { return width_ * (max_blocks_ - shared_); }
    // Promises all of them; false, and nothing changes, when the pool cannot.
    [[nodiscard]] bool reserve(BlockPool& pool);
    // The prompt is computed: `live` beams go on from it.
    void branch(BlockPool& pool, std::span<const int32_t> prompt_blocks, int live);
    [[nodiscard]] bool branched() const { return branched_; }
    // Beam b goes on from what was beam parents[b]; each has `computed` tokens in the cache.
    void reorder(BlockPool& pool, std::span<const int> parents, int computed);
    // Gives every beam a place for `tokens` positions.
    void grow(BlockPool& pool, int64_t tokens);
    // Gives everything back. Harmless when nothing is held.
    void close(BlockPool& pool);

    [[nodiscard]] std::span<const int32_t> blocks(int beam) const {
        return tables_[static_cast<size_t>(beam)];
    }
    // The window blocks of them, where some layers have a window: a search reads all.
    [[nodiscard]] std::span<const int32_t> windows(int beam) const {
        return windows_[static_cast<size_t>(beam)];
    }
    // To be made in this order before the next step; cleared by the next branch() or reorder().
    [[nodiscard]] std::span<const BlockCopy> copies() const { return copies_; }

private:
    [[nodiscard]] int32_t take(BlockPool& pool);
    void let_go(BlockPool& pool, int32_t block);
    void release(BlockPool& pool, int32_t block);
    void name_windows(const BlockPool& pool);

    int width_;
    int prompt_tokens_;
    int shared_;  // full blocks of the prompt
    int max_blocks_;
    int live_ = 0;
    int promised_ = 0;
    int promised_windows_ = 0;  // from reserve() to close()
    bool branched_ = false;
    std::vector<std::vector<int32_t>> tables_;  // by beam
    std::vector<std::vector<int32_t>> next_;
    std::vector<std::vector<int32_t>> windows_;  // by beam
    std::vector<int> heirs_;                     // by beam: the first that continues it; -1: nobody
    std::vector<BlockCopy> copies_;
};

}  // namespace castiron
