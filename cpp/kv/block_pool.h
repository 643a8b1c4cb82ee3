// The KV cache's blocks: who holds which, which are cached for later, how many are free and promised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kv/block_move.h"
#include "kv/eviction_queue.h"
#include "kv/host_tier.h"
#include "kv/prefix_tree.h"
#include "kv/window_pool.h"

namespace castiron {

// A fixed pool of KV blocks (kBlockTokens tokens each, over all layers). It only counts: the bytes are the
// device's. Not thread-safe: the engine thread owns it. Allocates in the constructor only.
//
// A block is *used* while sequences hold references on it, several of them if they share it. When the last
// one lets go, a block that is in the prefix tree stays *cached*: it may be used again, or evicted when a
// block is needed and none is free. Other blocks are *free* then. A sequence that holds a block of the tree
// holds the whole path to it; so below a block that nobody uses nothing is used, and every cached block can
// be had by evicting leaves. The exception are sequences that let go of blocks behind their window of
// attention (KvWindow): when no leaf is left to evict, such a block takes what is built on it out of the
// tree.
//
// A *promise* sets blocks aside without choosing them: blocks that are free or cached, and no more of them
// than there are.
//
// A sequence with a window takes a new block for each that it lets go, so each must be worth one, even if
// others hold it as well. Such a holder *pays*: a shared block counts once for each holder who pays, and once
// for all others together.
//
// Of a model of which some layers have a window nobody lets go of blocks early, but of their parts in these
// layers (WindowPool). A block that leaves the tree takes its part along.
class BlockPool {
public:
    // Throws std::invalid_argument unless num_blocks >= 1. window_blocks: of layers with a window, if others
    // have none; else 0. set_aside: of them, for what the chunks of a step take (WindowPool).
    explicit BlockPool(int num_blocks, int window_blocks = 0, int set_aside = 0);

    [[nodiscard]] int total() const { return static_cast<int>(holders_.size()); }
    [[nodiscard]] int free() const { return static_cast<int>(free_.size()); }
    [[nodiscard]] int cached() const { return cached_; }
    [[nodiscard]] int used() const { return total() - free() - cached_; }
    [[nodiscard]] int promised() const { return promised_; }
    // Blocks that can be promised.
    [[nodiscard]] int available() const { return free() + cached_ - promised_ - paid_twice_; }
    [[nodiscard]] int references(int32_t block) const { return holders_[checked(block)].all; }
    [[nodiscard]] int64_t evictions() const { return evictions_; }
    [[nodiscard]] const PrefixTree& tree() const { return tree_; }

    // Sets `blocks` aside; false, and nothing changes, when fewer are available.
    [[nodiscard]] bool promise(int blocks);
    // Gives back what was promised and not taken.
    void withdraw(int blocks);
    // Takes one promised block, with one reference: a free one, else the cached one that can best be spared.
    // Throws std::logic_error when none is promised.
    [[nodiscard]] int32_t take_promised(bool pays = false);
    // Whether there is a block to spare for one more holder, if he takes one.
    [[nodiscard]] bool can_retain(int32_t block, bool pays = false) const;
    // One more holder of a used block, or the first of a cached one, as can_retain() says.
    void retain(int32_t block, bool pays = false);
    // One holder less; the last one frees the block, or leaves it cached. Of one who pays, a block more is
    // available afterwards in any case.
    void release(int32_t block, bool pays = false);

    // Enters a used block into the prefix tree, below `parent`, which its holder holds as well.
    void cache(int32_t block, int32_t parent, const CacheSalt& salt, std::span<const int32_t> tokens,
               int32_t priority);
    // The block is worth as much as a use of this priority from now on; smaller numbers are worth more.
    void value(int32_t block, int32_t priority);
    // Takes a block and all below it out of the prefix tree; those in use stay with their holders.
    void forget(int32_t block);
    // Takes everything out of the prefix tree.
    void forget_all();

    // None where no layer has a window, or all have.
    [[nodiscard]] WindowPool* windows() { return windows_ ? &*windows_ : nullptr; }
    [[nodiscard]] const WindowPool* windows() const { return windows_ ? &*windows_ : nullptr; }
    // Where there are some: the block's window block; WindowPool::kNone where it has none.
    [[nodiscard]] int32_t window_of(int32_t block) const { return windows_->of(block); }
    // A window block for a block that has none, with one reader. One that is evicted for it goes to the tier.
    [[nodiscard]] int32_t take_window(int32_t block);
    // The same, with the contents that the tier has.
    [[nodiscard]] int32_t load_window(int32_t block);
    void read_window(int32_t block) { windows_->read(block); }
    // passed: the reader's window lies behind it; else he is gone.
    void end_window(int32_t block, bool passed = false) {
        windows_->end(block, passed, tree_.contains(block), priorities_[checked(block)]);
    }

    // What is evicted from now on goes to the tiers, window blocks to one of their own; null: nowhere.
    // Allocates.
    void use_tiers(const HostTiers& tiers);
    [[nodiscard]] const HostTiers& tiers() const { return tiers_; }
    // With a tier: what names a block of the tree.
    [[nodiscard]] const PathKey& key(int32_t block) const { return keys_[checked(block)]; }
    // With a tier: what names a block of these tokens below `parent`.
    [[nodiscard]] PathKey key_below(int32_t parent, const CacheSalt& salt,
                                    std::span<const int32_t> tokens) const;
    // Holds a block, or a window block, in its tier's memory until unpin(); false where that cannot be.
    [[nodiscard]] bool pin(const PathKey& key) { return tiers_.blocks->pin(key, moves_); }
    [[nodiscard]] bool pin_window(const PathKey& key) { return tiers_.windows->pin(key, moves_); }
    void unpin() {
        tiers_.each([](HostTier& tier) { tier.unpin(); });
    }
    // The block, which has just been cached, gets its contents from the tier.
    void load(int32_t block);
    // Appends what is to be copied from and to the tier, in this order, before anything else is done to the
    // blocks, and forgets it.
    void take_moves(std::vector<BlockMove>& moves);
    // As many as a step can need to and from the tiers.
    [[nodiscard]] size_t most_moves() const;

    // Throws std::logic_error that says what is wrong: a block in two states at once, one lost, a broken
    // promise, a tree that is none.
    void check_integrity() const;

private:
    // A block's holders, and how many of them pay.
    struct Holders {
        int32_t all = 0;  // 0: free or cached
        int32_t paying = 0;

        // Blocks that it counts as.
        [[nodiscard]] int worth() const { return paying + (all > paying ? 1 : 0); }
    };

    [[nodiscard]] size_t checked(int32_t block) const;
    void evict();
    [[nodiscard]] int32_t oldest_cached() const;
    void drop_leaf(int32_t leaf);

    PrefixTree tree_;
    EvictionQueue evictable_;          // cached leaves
    std::vector<Holders> holders_;     // by block
    std::vector<int32_t> priorities_;  // by block; of those in the tree
    std::vector<uint64_t> last_used_;  // by block; of those cached
    std::vector<int32_t> free_;        // a stack, so that warm blocks are used again first
    uint64_t clock_ = 0;               // counts releases
    int cached_ = 0;
    int promised_ = 0;
    int paid_twice_ = 0;  // what used blocks count as, over one each
    int64_t evictions_ = 0;
    std::optional<WindowPool> windows_;
    HostTiers tiers_;
    std::vector<PathKey> keys_;     // with a tier: by block, of those in the tree
    std::vector<BlockMove> moves_;  // to and from it, to be made before the next step
};

}  // namespace castiron
