#include "kv/window_pool.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace castiron {
namespace {

[[noreturn]] void broken(int32_t block, const std::string& what) {
    throw std::logic_error("the window block of KV block " + std::to_string(block) + " " + what);
}

}  // namespace

WindowPool::WindowPool(int total, int num_blocks, int set_aside)
    : evictable_(total),
      blocks_(static_cast<size_t>(total), kNone),
      windows_(static_cast<size_t>(num_blocks), kNone),
      readers_(windows_.size(), 0),
      sought_(windows_.size(), 0),
      set_aside_(set_aside) {
    free_.reserve(blocks_.size());
    for (int32_t window = total - 1; window >= 0; --window) free_.push_back(window);
}

bool WindowPool::promise(int count) {
    if (count < 0 || count > available()) return false;
    promised_ += count;
    return true;
}

void WindowPool::withdraw(int count) {
    if (count < 0 || count > promised_) {
        throw std::logic_error("withdrawing " + std::to_string(count) + " window blocks of " +
                               std::to_string(promised_) + " promised");
    }
    promised_ -= count;
}

WindowPool::Evicted WindowPool::evict() {
    if (evictable_.empty()) throw std::logic_error("more window blocks are read than were promised");
    ++evictions_;
    const int32_t window = evictable_.pop();
    const int32_t block = std::exchange(blocks_[static_cast<size_t>(window)], kNone);
    windows_[static_cast<size_t>(block)] = kNone;
    free_.push_back(window);
    return {window, block, is_sought(block)};
}

int32_t WindowPool::take(int32_t block) {
    if (of(block) != kNone) broken(block, "is there and was to be taken");
    if (free_.empty()) broken(block, "was to be taken and none is free");
    const int32_t window = free_.back();
    free_.pop_back();
    blocks_[static_cast<size_t>(window)] = block;
    windows_[static_cast<size_t>(block)] = window;
    readers_[static_cast<size_t>(block)] = 1;
    sought_[static_cast<size_t>(block)] = 0;
    return window;
}

void WindowPool::read(int32_t block) {
    if (of(block) == kNone) broken(block, "is gone and was to be read");
    if (readers_[static_cast<size_t>(block)]++ == 0) evictable_.remove(of(block));
    sought_[static_cast<size_t>(block)] = 1;
}

void WindowPool::end(int32_t block, bool passed, bool keep, int32_t priority) {
    int32_t& readers = readers_[static_cast<size_t>(block)];
    if (readers < 1) broken(block, "has no reader and one was to end");
    if (!passed) sought_[static_cast<size_t>(block)] = 1;
    if (--readers > 0) return;
    if (keep) return evictable_.push(of(block), priority, ++clock_);
    release(block);
}

void WindowPool::move(int32_t from, int32_t to) {
    if (of(to) != kNone) broken(to, "is there and another was to take its place");
    const int32_t window = std::exchange(windows_[static_cast<size_t>(from)], kNone);
    if (window == kNone) broken(from, "is gone and was to be another's");
    windows_[static_cast<size_t>(to)] = window;
    blocks_[static_cast<size_t>(window)] = to;
    readers_[static_cast<size_t>(to)] = std::exchange(readers_[static_cast<size_t>(from)], 0);
    sought_[static_cast<size_t>(to)] = 1;
}

void WindowPool::forget(int32_t block) {
    if (of(block) == kNone || readers(block) > 0) return;
    evictable_.remove(of(block));
    release(block);
}

void WindowPool::release(int32_t block) {
    const int32_t window = std::exchange(windows_[static_cast<size_t>(block)], kNone);
    blocks_[static_cast<size_t>(window)] = kNone;
    free_.push_back(window);
}

void WindowPool::check_integrity(const PrefixTree& tree,
                                 const std::function<int(int32_t)>& references) const {
    std::vector<bool> is_free(blocks_.size(), false);
    for (const int32_t window : free_) {
        if (is_free[static_cast<size_t>(window)] || blocks_[static_cast<size_t>(window)] != kNone)
            throw std::logic_error("window block " + std::to_string(window) + " is free and somebody's");
        is_free[static_cast<size_t>(window)] = true;
    }
    int owned = 0;
    int read = 0;
    for (int32_t block = 0; block < static_cast<int32_t>(windows_.size()); ++block) {
        if (readers(block) < 0 || readers(block) > references(block))
            broken(block, "has more readers than the block has holders");
        const int32_t window = of(block);
        if (window == kNone) {
            if (readers(block) > 0) broken(block, "is gone and has readers");
            continue;
        }
        ++owned;
        read += readers(block) > 0 ? 1 : 0;
        if (blocks_[static_cast<size_t>(window)] != block) broken(block, "is another block's as well");
        if (readers(block) == 0 && !tree.contains(block)) broken(block, "is lost: neither read nor cached");
        if (evictable_.contains(window) != (readers(block) == 0))
            broken(block, "may be evicted by mistake, or can never be");
    }
    if (owned + free() != total() || read != used()) {
        throw std::logic_error(std::to_string(total()) + " window blocks are " + std::to_string(owned) +
                               " of blocks and " + std::to_string(free()) + " free; " + std::to_string(read) +
                               " are read, " + std::to_string(used()) + " counted as used");
    }
    if (promised_ < 0 || available() < 0 || used() > promised_ + set_aside_) {
        throw std::logic_error(std::to_string(promised_) + " window blocks of " + std::to_string(total()) +
                               " are promised, and " + std::to_string(used()) + " used");
    }
}

}  // namespace castiron
