#include "kv/block_table.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace castiron {

BlockTable::BlockTable(int64_t max_tokens, const CacheUse& use, const KvWindow& window)
    : use_(use),
      window_(window),
      max_blocks_(blocks_for_tokens(max_tokens)),
      most_held_(window.most_blocks(max_tokens)),
      slides_(!window.of_some && window.first_kept(static_cast<int>(max_tokens)) > 0),
      windows_(max_blocks_, window) {
    blocks_.reserve(static_cast<size_t>(max_blocks_));
    next_slide_ = next_slide();
}

bool BlockTable::reserve(BlockPool& pool, int64_t tokens) {
    const int wanted = blocks_for_tokens(tokens);
    if (wanted > max_blocks_) throw std::logic_error("a sequence wants more KV blocks than its life takes");
    const int read = windows_.promised();
    if (!windows_.promise(pool, wanted)) return false;
    if (!promise_places(pool, wanted)) {
        windows_.cut_promise(pool, read);
        return false;
    }
    reserved_ = std::max(reserved_, wanted);
    return true;
}

bool BlockTable::promise_places(BlockPool& pool, int places) {
    const int missing = std::min(places, released_ + most_held_) - num_places();
    if (missing <= 0) return true;
    if (!pool.promise(missing)) return false;
    promised_ += missing;
    return true;
}

int BlockTable::next_slide() const {
    if (!slides_) return windows_.next_end();
    return window_.end_of(released_);
}

void BlockTable::let_go(BlockPool& pool, int computed) {
    if (windows_.active()) {
        windows_.slide(pool, blocks_, computed);
        next_slide_ = next_slide();
        return;
    }
    const int first = window_.first_kept(computed);
    for (int place = released_; place < first; ++place) {
        pool.release(blocks_[static_cast<size_t>(place)], slides_);
    }
    std::fill_n(blocks_.begin(), first, blocks_[static_cast<size_t>(first)]);
    released_ = first;
    next_slide_ = next_slide();
    if (!promise_places(pool, reserved_))
        throw std::logic_error("a KV block behind the window was worth none");
}

void BlockTable::take(BlockPool& pool, int blocks) {
    while (static_cast<int>(blocks_.size()) < blocks) {
        take_block(pool);
        windows_.take(pool, blocks_.back());
    }
}

void BlockTable::take_block(BlockPool& pool) {
    if (promised_ < 1) throw std::logic_error("a sequence grew past the KV blocks promised to it");
    blocks_.push_back(pool.take_promised(slides_));
    --promised_;
}

void BlockTable::close(BlockPool& pool) {
    windows_.close(pool, blocks_);
    // Last block first: of a path in the tree the end is the first to be evicted.
    while (static_cast<int>(blocks_.size()) > released_) {
        pool.release(blocks_.back(), slides_);
        blocks_.pop_back();
    }
    blocks_.clear();
    num_cached_ = released_ = reserved_ = 0;
    next_slide_ = next_slide();
    pool.withdraw(std::exchange(promised_, 0));
}

int32_t BlockTable::path_end() const {
    return num_cached_ == 0 ? PrefixTree::kNone : blocks_[static_cast<size_t>(num_cached_) - 1];
}

// Whether the tree still has the sequence's path: it may have been forgotten, or left behind by a window that
// is shorter than what one step computed.
bool BlockTable::at_path_end(const BlockPool& pool) const {
    return use_.enabled && path_is_held() && (num_cached_ == 0 || pool.tree().contains(path_end()));
}

// Takes a block of the tree as the next of the path. False when the pool has none to spare.
bool BlockTable::share(BlockPool& pool, int32_t block) {
    const auto place = static_cast<size_t>(num_cached_);
    if (place < blocks_.size()) {
        pool.release(blocks_[place], slides_);  // it holds the same, or less
        pool.retain(block, slides_);
        blocks_[place] = block;
    } else {
        if (promised_ > 0) {
            pool.withdraw(1);
            --promised_;
        } else if (!pool.can_retain(block, slides_)) {
            return false;
        }
        pool.retain(block, slides_);
        blocks_.push_back(block);
    }
    pool.value(block, use_.priority);
    ++num_cached_;
    return true;
}

// A place of the sequence's own for the contents of `block`. False when there is none.
bool BlockTable::copy_from(BlockPool& pool, int32_t block, std::optional<BlockCopy>& copy) {
    const auto place = static_cast<size_t>(num_cached_);
    if (place >= blocks_.size()) {
        // Taking a block may evict one, and it must not be this.
        if (promised_ < 1 || !pool.can_retain(block)) return false;
        if (windows_.active()) {
            pool.read_window(block);
            if (!pool.windows()->has_spare()) {
                pool.end_window(block);
                return false;
            }
        }
        pool.retain(block);
        take(pool, num_cached_ + 1);
        if (windows_.active()) pool.end_window(block);
        pool.release(block);
    }
    copy = {block, blocks_[place]};
    return true;
}

// Whether the tier has the next block, and the sequence a place for it.
bool BlockTable::in_tier(const BlockPool& pool, std::span<const int32_t> tokens) const {
    if (pool.tiers().blocks == nullptr || tokens.size() < kBlockTokens) return false;
    if (num_cached_ == static_cast<int>(blocks_.size()) && promised_ < 1) return false;
    return pool.tiers().blocks->contains(pool.key_below(path_end(), use_.salt, tokens.first(kBlockTokens)));
}

// The next block comes from the tier into the sequence's own place, and enters the tree.
void BlockTable::load(BlockPool& pool, std::span<const int32_t> tokens) {
    const int32_t block = blocks_[static_cast<size_t>(num_cached_)];
    pool.cache(block, path_end(), use_.salt, tokens, use_.priority);
    pool.load(block);
    ++num_cached_;
}

int BlockTable::reuse(BlockPool& pool, std::span<const int32_t> tokens, int computed,
                      std::optional<BlockCopy>& copy) {
    if (!at_path_end(pool)) return computed;
    if (windows_.active()) return reuse_windows(pool, tokens, computed, copy);
    for (;;) {
        const int begin = num_cached_ * kBlockTokens;
        if (begin >= static_cast<int>(tokens.size())) return computed;
        const auto rest = tokens.subspan(static_cast<size_t>(begin));
        const auto found = pool.tree().find(path_end(), use_.salt, rest);
        if (found.tokens == kBlockTokens && share(pool, found.block)) {
            computed = std::max(computed, begin + kBlockTokens);
            slide(pool, computed);
            continue;
        }
        if (found.tokens < kBlockTokens && in_tier(pool, rest)) {
            if (num_cached_ == static_cast<int>(blocks_.size())) {
                // Taking a block may have taken one of the path, or of the tier, away.
                take(pool, num_cached_ + 1);
                if (!at_path_end(pool)) return computed;
                continue;
            }
            load(pool, rest.first(kBlockTokens));
            computed = std::max(computed, begin + kBlockTokens);
            slide(pool, computed);
            continue;
        }
        const int end = begin + found.tokens;
        return end > computed && copy_from(pool, found.block, copy) ? end : computed;
    }
}

void BlockTable::enter(BlockPool& pool, std::span<const int32_t> tokens, int computed) {
    while ((num_cached_ + 1) * kBlockTokens <= computed) {
        if (!at_path_end(pool)) return;
        const auto part = tokens.subspan(static_cast<size_t>(num_cached_) * kBlockTokens, kBlockTokens);
        const auto found = pool.tree().find(path_end(), use_.salt, part);
        if (found.tokens == kBlockTokens) {
            // Somebody computed the same at the same time, or before, and its window block is gone.
            windows_.exchange(pool, num_cached_, blocks_[static_cast<size_t>(num_cached_)], found.block);
            if (!share(pool, found.block)) throw std::logic_error("a KV block cannot be exchanged");
            continue;
        }
        pool.cache(blocks_[static_cast<size_t>(num_cached_)], path_end(), use_.salt, part, use_.priority);
        ++num_cached_;
    }
}

void BlockTable::forget(BlockPool& pool) {
    if (num_cached_ == 0) return;
    if (!path_is_held()) return pool.forget_all();  // nobody knows any more which path it was
    if (!pool.tree().contains(path_end())) return;
    int32_t first = path_end();
    while (pool.tree().parent(first) != PrefixTree::kNone) first = pool.tree().parent(first);
    pool.forget(first);
}

}  // namespace castiron
