// The KV blocks of one sequence, in the order of its tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "kv/block_pool.h"
#include "kv/cache_key.h"

namespace castiron {

// Blocks that `tokens` cached tokens take.
[[nodiscard]] constexpr int blocks_for_tokens(int64_t tokens) {
    return static_cast<int>((tokens + kBlockTokens - 1) / kBlockTokens);
}

// The contents of one block are to be copied to another before the next step.
struct BlockCopy {
    int32_t from = 0;
    int32_t to = 0;
};

// blocks()[p / kBlockTokens] holds position p. The table holds one reference on each of its blocks, plus a
// promise on the pool for some that it will still need. The first num_cached() blocks are in the prefix tree:
// found there, or entered when they were full. Where the tree had the same block already, the table took that
// one and gave its own back, so the first num_cached() blocks are always one path of the tree.
class BlockTable {
public:
    // Capacity for a whole life of max_tokens cached tokens: the only allocation, made where the request is
    // made.
    explicit BlockTable(int64_t max_tokens, const CacheUse& use = {});
    BlockTable(const BlockTable&) = delete;
    BlockTable& operator=(const BlockTable&) = delete;

    [[nodiscard]] std::span<const int32_t> blocks() const { return blocks_; }
    [[nodiscard]] int max_blocks() const { return max_blocks_; }
    // Held and promised.
    [[nodiscard]] int num_blocks() const { return static_cast<int>(blocks_.size()) + promised_; }
    [[nodiscard]] int num_cached() const { return num_cached_; }
    [[nodiscard]] const CacheUse& cache_use() const { return use_; }

    // Promises what the sequence lacks for `tokens` positions; false, and nothing changes, when the pool
    // cannot. Throws std::logic_error past max_tokens.
    [[nodiscard]] bool reserve(BlockPool& pool, int64_t tokens);
    // Takes promised blocks until `tokens` positions have a place.
    void grow(BlockPool& pool, int64_t tokens) {
        if (static_cast<int64_t>(blocks_.size()) * kBlockTokens < tokens)
            take(pool, blocks_for_tokens(tokens));
    }
    // Gives everything back, blocks and promises. Harmless on a table that holds nothing.
    void close(BlockPool& pool);

    // How many leading positions hold keys and values when the cache has given what it has of `tokens`, of
    // which `computed` were there before. Whole blocks are shared, in place of the sequence's own; of the
    // block after them the matching part is used by way of a copy, for which `copy` is set, once the table
    // has a promise. On a table without promises it stops where the pool has no block to spare.
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
    void take(BlockPool& pool, int blocks);
    void enter(BlockPool& pool, std::span<const int32_t> tokens, int computed);
    [[nodiscard]] bool share(BlockPool& pool, int32_t block);
    [[nodiscard]] bool copy_from(BlockPool& pool, int32_t block, std::optional<BlockCopy>& copy);
    [[nodiscard]] bool at_path_end(const BlockPool& pool) const;
    [[nodiscard]] int32_t path_end() const;

    std::vector<int32_t> blocks_;
    const CacheUse use_;
    int max_blocks_ = 0;
    int promised_ = 0;
    int num_cached_ = 0;
};

}  // namespace castiron
