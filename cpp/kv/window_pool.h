// The parts of KV blocks that the layers with a window of attention keep, of a model of which others see
// everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kv/eviction_queue.h"
#include "kv/prefix_tree.h"

namespace castiron {

// A fixed pool of *window blocks*: the part of a KV block that lies in these layers. There are fewer of them
// than blocks, since nobody reads them behind his window; so a block has one or has none. It only counts.
// BlockPool owns it, and is asked by others.
//
// A window block is *used* while its block has readers: holders within whose window it lies. When the last
// one is past it, it stays *cached* if the block is in the prefix tree, may be read again, or be evicted when
// one is needed and none is free. Others are *free*.
//
// What sequences may read at a time is promised to them once, whether others read the same or not: sharing
// saves computing, not room. So sequences never read more than is promised, and what a step writes besides is
// set aside for good.
class WindowPool {
public:
    static constexpr int32_t kNone = -1;

    // set_aside: for what the chunks of a step take besides what is promised.
    WindowPool(int total, int num_blocks, int set_aside);

    [[nodiscard]] int total() const { return static_cast<int>(blocks_.size()); }
    [[nodiscard]] int free() const { return static_cast<int>(free_.size()); }
    [[nodiscard]] int cached() const { return evictable_.size(); }
    [[nodiscard]] int used() const { return total() - free() - cached(); }
    [[nodiscard]] int promised() const { return promised_; }
    // That one sequence can be promised if no other is there.
    [[nodiscard]] int most() const { return total() - set_aside_; }
    [[nodiscard]] int available() const { return most() - promised_; }
    [[nodiscard]] int64_t evictions() const { return evictions_; }
    // The block's window block, or kNone.
    [[nodiscard]] int32_t of(int32_t block) const { return windows_[static_cast<size_t>(block)]; }
    [[nodiscard]] int readers(int32_t block) const { return readers_[static_cast<size_t>(block)]; }

    // False, and nothing changes, when fewer are available.
    [[nodiscard]] bool promise(int count);
    void withdraw(int count);
    // Whether one is free or can be evicted.
    [[nodiscard]] bool has_spare() const { return !free_.empty() || !evictable_.empty(); }
    // Whether one must be evicted before one can be taken.
    [[nodiscard]] bool is_full() const { return free_.empty(); }
    // Frees the one that can best be spared, and says which and whose it was. Throws std::logic_error when
    // all are used.
    struct Evicted {
        int32_t window, block;
        bool sought;
    };
    Evicted evict();
    // Whether somebody is likely to look for the block's: a sequence ended there, or another has read it. Of
    // a long prompt that is true of a few; the others would only drive those out of the host tier.
    [[nodiscard]] bool is_sought(int32_t block) const { return sought_[static_cast<size_t>(block)] != 0; }
    // A free one for a block that has none, with one reader.
    int32_t take(int32_t block);
    // One more reader of a block that has one.
    void read(int32_t block);
    // One reader less, whose window passed it, or who is gone; the last one leaves it cached (keep), or frees
    // it.
    void end(int32_t block, bool passed, bool keep, int32_t priority);
    // The window block of one block becomes, with its readers, that of another that has none.
    void move(int32_t from, int32_t to);
    // The block left the prefix tree: what it has is free unless somebody reads it.
    void forget(int32_t block);

    // Throws std::logic_error that says what is wrong. references: of a block.
    void check_integrity(const PrefixTree& tree, const std::function<int(int32_t)>& references) const;

private:
    void release(int32_t block);

    EvictionQueue evictable_;       // by window block
    std::vector<int32_t> blocks_;   // by window block: whose it is; kNone: free
    std::vector<int32_t> windows_;  // by block
    std::vector<int32_t> readers_;  // by block
    std::vector<uint8_t> sought_;   // by block
    std::vector<int32_t> free_;     // a stack
    uint64_t clock_ = 0;
    int set_aside_;
    int promised_ = 0;
    int64_t evictions_ = 0;
};

}  // namespace castiron
