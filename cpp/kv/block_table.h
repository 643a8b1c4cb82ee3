// The KV blocks of one sequence, in the order of its tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "kv/block_move.h"
#include "kv/block_pool.h"
#include "kv/cache_key.h"
#include "kv/kv_window.h"
#include "kv/window_table.h"

namespace castiron {

// blocks()[p / kBlockTokens] holds position p. The table holds one reference on each of its blocks, plus a
// promise on the pool for some that it will still need. The first num_cached() blocks are in the prefix tree:
// found there, or entered when they were full. Where the tree had the same block already, the table took that
// one and gave its own back, so the first num_cached() blocks are always one path of the tree.
//
// Where all layers have a window (KvWindow) the table lets go of blocks that nobody reads any more. Their
// places in blocks() name the first block that is still held, so that a device which looks there finds
// numbers, and none that count. Each of them is worth a block (BlockPool), so the promise moves on with the
// window: there are never more than KvWindow::most_blocks(), held and promised together. Where some layers
// have one, it keeps its blocks and goes on without the window blocks of those behind (WindowTable).
class BlockTable {
public:
    // Capacity for a whole life of max_tokens cached tokens: the only allocation, made where the request is
    // made.
    explicit BlockTable(int64_t max_tokens, const CacheUse& use = {}, const KvWindow& window = {});
    BlockTable(const BlockTable&) = delete;
    BlockTable& operator=(const BlockTable&) = delete;

    [[nodiscard]] std::span<const int32_t> blocks() const { return blocks_; }
    [[nodiscard]] int max_blocks() const { return max_blocks_; }
    // Those of blocks() that are held.
    [[nodiscard]] std::span<const int32_t> held() const {
        return std::span(blocks_).subspan(static_cast<size_t>(released_));
    }
    // Blocks behind the window, which were let go.
    [[nodiscard]] int num_released() const { return released_; }
    [[nodiscard]] bool slides() const { return slides_; }
    [[nodiscard]] const WindowTable& windows() const { return windows_; }
    // Held and promised.
    [[nodiscard]] int num_blocks() const { return num_places() - released_; }
    // Places that have a block, had one or are promised one.
    [[nodiscard]] int num_places() const { return static_cast<int>(blocks_.size()) + promised_; }
    [[nodiscard]] int num_cached() const { return num_cached_; }
    [[nodiscard]] const CacheUse& cache_use() const { return use_; }

    // Promises what the sequence lacks for `tokens` positions, as far as it may hold them at a time; false,
    // and nothing changes, when the pool cannot. Throws std::logic_error past max_tokens.
    [[nodiscard]] bool reserve(BlockPool& pool, int64_t tokens);
    // Takes promised blocks until `tokens` positions have a place.
    void grow(BlockPool& pool, int64_t tokens) {
        if (static_cast<int64_t>(blocks_.size()) * kBlockTokens < tokens)
            take(pool, blocks_for_tokens(tokens));
    }
    // `computed` positions are in the cache: lets go of blocks that no later one reads, and is promised as
    // many for what it still lacks of the positions last reserved; or of their window blocks. A step that
    // still reads them must be done, or run before whatever is written to them next.
    void slide(BlockPool& pool, int computed) {
        if (computed >= next_slide_) let_go(pool, computed);
    }
    // Gives everything back, blocks and promises. Harmless on a table that holds nothing.
    void close(BlockPool& pool);

    // How many leading positions hold keys and values when the cache has given what it has of `tokens`, of
    // which `computed` were there before. Whole blocks are shared, in place of the sequence's own; of the
    // block after them the matching part is used by way of a copy, for which `copy` is set, once the table
    // has a promise. A block that the host tier has is loaded into one that was promised. On a table without
    // promises it stops where the pool has no block to spare. What the pool is told to move on the way comes
    // before the copy. Where some layers have a window it goes on from the last place that has the window
    // blocks which the next token sees.
    [[nodiscard]] int reuse(BlockPool& pool, std::span<const int32_t> tokens, int computed,
                            std::optional<BlockCopy>& copy);
    // Enters the blocks that are full now into the prefix tree. `tokens` are the sequence's, of which
    // `computed` have their keys and values.
    void keep(BlockPool& pool, std::span<const int32_t> tokens, int computed) {
        if ((num_cached_ + 1) * kBlockTokens <= computed) enter(pool, tokens, computed);
    }
    // Takes the sequence's blocks, and what others built on them, out of the prefix tree.
    void forget(BlockPool& pool);

private:
    static constexpr int kNever = WindowTable::kNever;

    void take_block(BlockPool& pool);
    void take(BlockPool& pool, int blocks);
    void let_go(BlockPool& pool, int computed);
    [[nodiscard]] int next_slide() const;
    [[nodiscard]] bool promise_places(BlockPool& pool, int places);
    [[nodiscard]] bool path_is_held() const { return released_ == 0 || num_cached_ > released_; }
    void enter(BlockPool& pool, std::span<const int32_t> tokens, int computed);
    [[nodiscard]] bool share(BlockPool& pool, int32_t block);
    [[nodiscard]] bool in_tier(const BlockPool& pool, std::span<const int32_t> tokens) const;
    void load(BlockPool& pool, std::span<const int32_t> tokens);
    [[nodiscard]] bool copy_from(BlockPool& pool, int32_t block, std::optional<BlockCopy>& copy);
    [[nodiscard]] bool at_path_end(const BlockPool& pool) const;
    [[nodiscard]] int32_t path_end() const;

    // path_match.cc
    [[nodiscard]] int match(const BlockPool& pool, std::span<const int32_t> tokens, int computed,
                            bool with_tiers) const;
    [[nodiscard]] bool pin(BlockPool& pool, std::span<const int32_t> tokens, int blocks) const;
    void follow(BlockPool& pool, std::span<const int32_t> tokens, int blocks);
    [[nodiscard]] int reuse_windows(BlockPool& pool, std::span<const int32_t> tokens, int computed,
                                    std::optional<BlockCopy>& copy);

    std::vector<int32_t> blocks_;
    int promised_ = 0;
    int num_cached_ = 0;
    int next_slide_ = kNever;  // computed positions at which the next block is let go
    const CacheUse use_;
    const KvWindow window_;
    const int max_blocks_;
    const int most_held_;  // blocks, with the promised ones
    const bool slides_;
    int reserved_ = 0;  // places, at the most
    int released_ = 0;
    WindowTable windows_;
};

}  // namespace castiron
