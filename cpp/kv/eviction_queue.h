// The order in which cached blocks are given up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace castiron {

// Blocks that may be evicted: the largest priority number first, of equal ones the least recently used. A
// binary heap that knows where each block is. Takes all its memory in the constructor.
class EvictionQueue {
public:
    explicit EvictionQueue(int num_blocks);

    [[nodiscard]] bool empty() const { return heap_.empty(); }
    [[nodiscard]] int size() const { return static_cast<int>(heap_.size()); }
    [[nodiscard]] bool contains(int32_t block) const { return entry(block).place != kAbsent; }
    // `block` is not in the queue.
    void push(int32_t block, int32_t priority, uint64_t last_used);
    // Ignored when the block is not in the queue.
    void remove(int32_t block);
    // The next to go; the queue is not empty.
    [[nodiscard]] int32_t pop();

private:
    static constexpr int32_t kAbsent = -1;

    struct Entry {
        uint64_t last_used = 0;
        int32_t priority = 0;
        int32_t place = kAbsent;  // in the heap
    };

    [[nodiscard]] const Entry& entry(int32_t block) const { return entries_[static_cast<size_t>(block)]; }
    [[nodiscard]] bool sooner(int32_t a, int32_t b) const;
    void put(size_t place, int32_t block);
    void sift_up(size_t place);
    void sift_down(size_t place);

    std::vector<Entry> entries_;  // by block
    std::vector<int32_t> heap_;
};

}  // namespace castiron
