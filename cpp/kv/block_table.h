// The KV blocks of one sequence, in the order of its tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/block_pool.h"

namespace castiron {

// Blocks that `tokens` cached tokens take.
[[nodiscard]] int blocks_for_tokens(int64_t tokens);

// blocks()[p / kBlockTokens] holds position p. The table holds one reference on each of its blocks, plus a
// promise on the pool for those it will still need.
class BlockTable {
public:
    // Capacity for a whole life of max_tokens cached tokens: the only allocation, made where the request is
    // made.
    explicit BlockTable(int64_t max_tokens);
    BlockTable(const BlockTable&) = delete;
    BlockTable& operator=(const BlockTable&) = delete;

    [[nodiscard]] std::span<const int32_t> blocks() const { return blocks_; }
    [[nodiscard]] int max_blocks() const { return max_blocks_; }

    // Promises all blocks of the sequence's life; false when the pool cannot.
    [[nodiscard]] bool open(BlockPool& pool);
    // Takes promised blocks until `tokens` positions have a place. Throws std::logic_error past max_tokens.
    void grow(BlockPool& pool, int64_t tokens);
    // Gives everything back, blocks and promises. Harmless on a table that is not open.
    void close(BlockPool& pool);

private:
    std::vector<int32_t> blocks_;
    int max_blocks_ = 0;
    int promised_ = 0;
};

}  // namespace castiron
