#include "kv/window_table.h"

#include <algorithm>
#include <utility>

namespace castiron {

WindowTable::WindowTable(int max_blocks, const KvWindow& window)
    : window_(window), most_(window.of_some ? window.most_window_blocks(max_blocks) : 0) {
    if (active()) table_.reserve(static_cast<size_t>(max_blocks));
}

bool WindowTable::promise(BlockPool& pool, int blocks) {
    if (!active()) return true;
    const int missing = window_.most_window_blocks(blocks) - promised_;
    if (missing <= 0) return true;
    if (!pool.windows()->promise(missing)) return false;
    promised_ += missing;
    return true;
}

void WindowTable::cut_promise(BlockPool& pool, int promised) {
    if (promised == promised_) return;
    pool.windows()->withdraw(promised_ - promised);
    promised_ = promised;
}

void WindowTable::take(BlockPool& pool, int32_t block) {
    if (active()) table_.push_back(pool.take_window(block));
}

int WindowTable::next_end() const {
    if (!active() || window_.tokens == 0) return kNever;
    return window_.end_of(first_);
}

// Places before the first that is read.
void WindowTable::name_first() {
    std::fill_n(table_.begin(), first_, table_[static_cast<size_t>(first_)]);
}

void WindowTable::slide(BlockPool& pool, std::span<const int32_t> blocks, int computed) {
    const int first = window_.first_kept(computed);
    if (first <= first_) return;
    while (first_ < first) pool.end_window(blocks[static_cast<size_t>(first_++)], true);
    name_first();
}

void WindowTable::stop(BlockPool& pool, std::span<const int32_t> blocks) {
    for (int place = static_cast<int>(table_.size()); place-- > first_;)
        pool.end_window(blocks[static_cast<size_t>(place)]);
    table_.clear();
    first_ = 0;
}

void WindowTable::start(BlockPool& pool, std::span<const int32_t> blocks) {
    const auto first =
        static_cast<size_t>(window_.first_kept(static_cast<int>(blocks.size()) * kBlockTokens));
    // First those that are there: taking one may evict another.
    for (size_t i = first; i < blocks.size(); ++i) {
        if (pool.window_of(blocks[i]) != WindowPool::kNone) pool.read_window(blocks[i]);
    }
    table_.resize(blocks.size());
    for (size_t i = first; i < blocks.size(); ++i) {
        const int32_t there = pool.window_of(blocks[i]);
        table_[i] = there != WindowPool::kNone ? there : pool.load_window(blocks[i]);
    }
    first_ = static_cast<int>(first);
    name_first();
}

void WindowTable::exchange(BlockPool& pool, int place, int32_t own, int32_t other) {
    if (!active() || place < first_) return;
    if (pool.window_of(other) == WindowPool::kNone) {
        pool.windows()->move(own, other);
    } else {
        pool.read_window(other);
        pool.end_window(own);
        table_[static_cast<size_t>(place)] = pool.window_of(other);
        if (place == first_) name_first();
    }
}

void WindowTable::close(BlockPool& pool, std::span<const int32_t> blocks) {
    if (!active()) return;
    stop(pool, blocks);
    cut_promise(pool, 0);
}

}  // namespace castiron
