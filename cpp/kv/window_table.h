// Which window blocks one sequence reads, of a model of which some layers have a window of attention.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kv/block_pool.h"
#include "kv/kv_window.h"

namespace castiron {

// Goes along with the sequence's BlockTable: blocks()[i] is the window block of its block i. Those from
// first() on are read; the places before name one that is, so that a device which looks there finds numbers,
// and none that count. Without KvWindow::of_some it is empty and does nothing.
class WindowTable {
public:
    static constexpr int kNever = std::numeric_limits<int>::max();

    // Capacity for a whole life: the only allocation.
    WindowTable(int max_blocks, const KvWindow& window);

    [[nodiscard]] bool active() const { return window_.of_some; }
    [[nodiscard]] std::span<const int32_t> blocks() const { return table_; }
    [[nodiscard]] int first() const { return first_; }
    // What it may read at a time, besides what a step feeds it.
    [[nodiscard]] int promised() const { return promised_; }
    [[nodiscard]] bool wants_more() const { return active() && promised_ < most_; }

    // Promises what a sequence of so many blocks reads at a time; false, and nothing changes, when the pool
    // cannot.
    [[nodiscard]] bool promise(BlockPool& pool, int blocks);
    // Leaves so many promised.
    void cut_promise(BlockPool& pool, int promised);
    // The sequence's next block is one of its own.
    void take(BlockPool& pool, int32_t block);
    // Computed positions at which the first reading ends.
    [[nodiscard]] int next_end() const;
    // Ends the readings of blocks that no token behind `computed` positions sees.
    void slide(BlockPool& pool, std::span<const int32_t> blocks, int computed);
    // Ends all readings, of the last block first.
    void stop(BlockPool& pool, std::span<const int32_t> blocks);
    // After stop(): reads what a token behind these blocks, all of them full and in the prefix tree, sees of
    // them. What is not there is taken from the host tier.
    void start(BlockPool& pool, std::span<const int32_t> blocks);
    // The sequence's own block in this place is about to give way to one of the prefix tree, of the same
    // contents.
    void exchange(BlockPool& pool, int place, int32_t own, int32_t other);
    // Gives everything back.
    void close(BlockPool& pool, std::span<const int32_t> blocks);

private:
    void name_first();

    const KvWindow window_;
    const int most_;
    std::vector<int32_t> table_;
    int first_ = 0;
    int promised_ = 0;
};

}  // namespace castiron
