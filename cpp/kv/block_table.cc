#include "kv/block_table.h"

#include <stdexcept>
#include <utility>

#include "device/device.h"

namespace castiron {

int blocks_for_tokens(int64_t tokens) {
    return static_cast<int>((tokens + kBlockTokens - 1) / kBlockTokens);
}

BlockTable::BlockTable(int64_t max_tokens) : max_blocks_(blocks_for_tokens(max_tokens)) {
    blocks_.reserve(static_cast<size_t>(max_blocks_));
}

bool BlockTable::open(BlockPool& pool) {
    const int missing = max_blocks_ - static_cast<int>(blocks_.size()) - promised_;
    if (!pool.promise(missing)) return false;
    promised_ += missing;
    return true;
}

void BlockTable::grow(BlockPool& pool, int64_t tokens) {
    const int wanted = blocks_for_tokens(tokens);
    if (wanted > max_blocks_) throw std::logic_error("a sequence grew past the KV blocks promised to it");
    while (static_cast<int>(blocks_.size()) < wanted) {
        blocks_.push_back(pool.take_promised());
        --promised_;
    }
}

void BlockTable::close(BlockPool& pool) {
    // Last block first: the pool's free list is a stack, so the next sequence gets them in ascending order.
    while (!blocks_.empty()) {
        pool.release(blocks_.back());
        blocks_.pop_back();
    }
    pool.withdraw(std::exchange(promised_, 0));
}

}  // namespace castiron
