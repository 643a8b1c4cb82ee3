#include "kv/block_pool.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace castiron {
namespace {

int positive(int num_blocks) {
    if (num_blocks >= 1) return num_blocks;
    throw std::invalid_argument("the KV cache has " + std::to_string(num_blocks) +
                                " blocks; at least 1 is needed");
}

[[noreturn]] void broken(int32_t block, const std::string& what) {
    throw std::logic_error("KV block " + std::to_string(block) + " " + what);
}

}  // namespace

BlockPool::BlockPool(int num_blocks, int window_blocks, int set_aside)
    : tree_(positive(num_blocks)),
      evictable_(num_blocks),
      holders_(static_cast<size_t>(num_blocks)),
      priorities_(holders_.size()),
      last_used_(holders_.size()) {
    free_.reserve(holders_.size());
    for (int32_t block = num_blocks - 1; block >= 0; --block) free_.push_back(block);
    if (window_blocks > 0) windows_.emplace(window_blocks, num_blocks, set_aside);
}

size_t BlockPool::checked(int32_t block) const {
    if (block < 0 || block >= total()) broken(block, "is outside the pool of " + std::to_string(total()));
    return static_cast<size_t>(block);
}

bool BlockPool::promise(int blocks) {
    if (blocks < 0 || blocks > available()) return false;
    promised_ += blocks;
    return true;
}

void BlockPool::withdraw(int blocks) {
    if (blocks < 0 || blocks > promised_) {
        throw std::logic_error("withdrawing " + std::to_string(blocks) + " KV blocks of " +
                               std::to_string(promised_) + " promised");
    }
    promised_ -= blocks;
}

int32_t BlockPool::take_promised(bool pays) {
    if (promised_ < 1) throw std::logic_error("a KV block was taken that had not been promised");
    if (free_.empty()) evict();
    --promised_;
    const int32_t block = free_.back();
    free_.pop_back();
    holders_[checked(block)] = {1, pays ? 1 : 0};
    return block;
}

bool BlockPool::can_retain(int32_t block, bool pays) const {
    const Holders& now = holders_[checked(block)];
    const Holders then{now.all + 1, now.paying + (pays ? 1 : 0)};
    return then.worth() == now.worth() || available() >= 1;
}

void BlockPool::retain(int32_t block, bool pays) {
    Holders& holders = holders_[checked(block)];
    if (holders.all == 0 && !tree_.contains(block)) broken(block, "is free and was retained");
    if (!can_retain(block, pays)) broken(block, "was retained although all that are not used are promised");
    if (holders.all == 0) {
        --cached_;
        evictable_.remove(block);
    }
    const int before = std::max(holders.worth(), 1);
    ++holders.all;
    if (pays) ++holders.paying;
    paid_twice_ += holders.worth() - before;
}

void BlockPool::release(int32_t block, bool pays) {
    Holders& holders = holders_[checked(block)];
    if (holders.all < 1 || (pays && holders.paying < 1)) broken(block, "has no holder and was released");
    const int before = holders.worth();
    --holders.all;
    if (pays) --holders.paying;
    paid_twice_ -= before - std::max(holders.worth(), 1);
    if (holders.all > 0) return;
    if (!tree_.contains(block)) {
        free_.push_back(block);
        return;
    }
    ++cached_;
    last_used_[checked(block)] = ++clock_;
    if (tree_.is_leaf(block)) evictable_.push(block, priorities_[checked(block)], clock_);
}

void BlockPool::cache(int32_t block, int32_t parent, const CacheSalt& salt, std::span<const int32_t> tokens,
                      int32_t priority) {
    if (references(block) < 1) broken(block, "is not in use and was to be cached");
    if (parent != PrefixTree::kNone && references(parent) < 1)
        broken(parent, "lost its last holder too early");
    tree_.insert(block, parent, salt, tokens);
    priorities_[checked(block)] = priority;
    if (tiers_.blocks != nullptr) keys_[checked(block)] = key_below(parent, salt, tokens);
}

void BlockPool::value(int32_t block, int32_t priority) {
    int32_t& least = priorities_[checked(block)];
    least = std::min(least, priority);
}

void BlockPool::evict() {
    ++evictions_;
    if (evictable_.empty()) return forget(oldest_cached());
    const int32_t leaf = evictable_.pop();
    if (tiers_.blocks != nullptr) tiers_.blocks->save(keys_[checked(leaf)], leaf, moves_);
    if (tiers_.windows != nullptr && window_of(leaf) != WindowPool::kNone && windows_->is_sought(leaf))
        tiers_.windows->save(keys_[checked(leaf)], window_of(leaf), moves_);
    drop_leaf(leaf);
}

// For when everything that is built on the cached blocks is in use. A search through all of them, which
// happens once for a path: it takes the whole of it out of the tree.
int32_t BlockPool::oldest_cached() const {
    int32_t oldest = PrefixTree::kNone;
    for (int32_t block = 0; block < total(); ++block) {
        if (references(block) > 0 || !tree_.contains(block)) continue;
        if (oldest == PrefixTree::kNone || last_used_[checked(block)] < last_used_[checked(oldest)])
            oldest = block;
    }
    if (oldest == PrefixTree::kNone)
        throw std::logic_error("a KV block was promised and none can be evicted");
    return oldest;
}

// Out of the tree; free unless somebody holds it. Its parent may be the next to go.
void BlockPool::drop_leaf(int32_t leaf) {
    const int32_t parent = tree_.parent(leaf);
    tree_.remove(leaf);
    if (windows_) windows_->forget(leaf);
    if (references(leaf) == 0) {
        evictable_.remove(leaf);
        --cached_;
        free_.push_back(leaf);
    }
    if (parent != PrefixTree::kNone && references(parent) == 0 && tree_.is_leaf(parent)) {
        evictable_.push(parent, priorities_[checked(parent)], last_used_[checked(parent)]);
    }
}

void BlockPool::forget(int32_t block) {
    if (!tree_.contains(block)) return;
    for (int32_t leaf = PrefixTree::kNone; leaf != block;) {
        leaf = tree_.some_leaf(block);
        drop_leaf(leaf);
    }
}

void BlockPool::forget_all() {
    for (int32_t leaf; (leaf = tree_.some_leaf(PrefixTree::kNone)) != PrefixTree::kNone;) drop_leaf(leaf);
}

int32_t BlockPool::take_window(int32_t block) {
    if (windows_->is_full()) {
        const auto [window, loser, sought] = windows_->evict();
        if (tiers_.windows != nullptr && sought) tiers_.windows->save(keys_[checked(loser)], window, moves_);
    }
    return windows_->take(block);
}

int32_t BlockPool::load_window(int32_t block) {
    const int32_t window = take_window(block);
    if (tiers_.windows == nullptr || !tiers_.windows->load(keys_[checked(block)], window, moves_))
        broken(block, "has no window block, and the host tier neither");
    return window;
}

void BlockPool::use_tiers(const HostTiers& tiers) {
    tiers_ = tiers;
    if (tiers.blocks == nullptr) return;
    keys_.resize(holders_.size());
    moves_.reserve(most_moves());
}

PathKey BlockPool::key_below(int32_t parent, const CacheSalt& salt, std::span<const int32_t> tokens) const {
    return path_key(parent == PrefixTree::kNone ? nullptr : &keys_[checked(parent)], salt, tokens);
}

void BlockPool::load(int32_t block) {
    if (!tiers_.blocks->load(keys_[checked(block)], block, moves_)) broken(block, "is not in the host tier");
}

void BlockPool::take_moves(std::vector<BlockMove>& moves) {
    moves.insert(moves.end(), moves_.begin(), moves_.end());
    moves_.clear();
}

size_t BlockPool::most_moves() const {
    if (tiers_.blocks == nullptr) return 0;
    const size_t windows = windows_ ? static_cast<size_t>(windows_->total()) : 0;
    return 2 * HostTier::kMostMoves * (holders_.size() + windows);
}

void BlockPool::check_integrity() const {
    std::vector<bool> is_free(holders_.size(), false);
    for (const int32_t block : free_) {
        if (is_free[checked(block)]) broken(block, "is in the free list twice");
        if (references(block) != 0) {
            broken(block, "is free and has " + std::to_string(references(block)) + " references");
        }
        if (tree_.contains(block)) broken(block, "is free and in the prefix tree");
        is_free[checked(block)] = true;
    }
    tree_.check_integrity();
    int cached = 0;
    int leaves = 0;
    int paid_twice = 0;
    for (int32_t block = 0; block < total(); ++block) {
        const bool in_tree = tree_.contains(block);
        if (references(block) < 0) broken(block, "has fewer than no references");
        if (references(block) == 0 && !is_free[checked(block)] && !in_tree) {
            broken(block, "is lost: not free, not cached, no references");
        }
        const bool is_cached = in_tree && references(block) == 0;
        cached += is_cached ? 1 : 0;
        leaves += is_cached && tree_.is_leaf(block) ? 1 : 0;
        if (evictable_.contains(block) != (is_cached && tree_.is_leaf(block))) {
            broken(block, evictable_.contains(block) ? "may be evicted by mistake" : "can never be evicted");
        }
        const Holders& holders = holders_[checked(block)];
        if (holders.paying < 0 || holders.paying > holders.all) broken(block, "has more payers than holders");
        if (holders.all > 0) paid_twice += holders.worth() - 1;
        if (in_tree && holders.all > holders.paying && tree_.parent(block) != PrefixTree::kNone &&
            references(tree_.parent(block)) == 0) {
            broken(block, "is in use and the block before it is not");
        }
    }
    if (windows_) windows_->check_integrity(tree_, [this](int32_t block) { return references(block); });
    if (cached != cached_ || leaves != evictable_.size()) {
        throw std::logic_error(std::to_string(cached_) + " KV blocks are counted as cached, " +
                               std::to_string(cached) + " are");
    }
    if (paid_twice != paid_twice_) {
        throw std::logic_error(std::to_string(paid_twice_) + " KV blocks are counted as paid twice, " +
                               std::to_string(paid_twice) + " are");
    }
    if (promised_ < 0 || available() < 0) {
        throw std::logic_error(std::to_string(promised_) + " KV blocks are promised, " +
                               std::to_string(free() + cached_ - paid_twice_) + " are free or cached");
    }
}

}  // namespace castiron
