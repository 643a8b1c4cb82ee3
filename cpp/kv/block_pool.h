// The KV cache's blocks: who holds which, how many are free, how many are promised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace castiron {

// A fixed pool of KV blocks (kBlockTokens tokens each, over all layers). It only counts: the bytes are the
// device's. Blocks have reference counts, so that several sequences can share one. Not thread-safe: the
// engine thread owns it.
//
// A *promise* sets blocks aside without choosing them. A request is admitted only when the blocks of its
// whole life can be promised, so that a running request never has to be thrown out for want of a block.
class BlockPool {
public:
    // Throws std::invalid_argument unless num_blocks >= 1.
    explicit BlockPool(int num_blocks);

    [[nodiscard]] int total() const { return static_cast<int>(references_.size()); }
    [[nodiscard]] int free() const { return static_cast<int>(free_.size()); }
    [[nodiscard]] int used() const { return total() - free(); }
    [[nodiscard]] int promised() const { return promised_; }
    [[nodiscard]] int references(int32_t block) const { return references_[checked(block)]; }

    // Sets `blocks` aside; false, and nothing changes, when fewer are free and unpromised.
    [[nodiscard]] bool promise(int blocks);
    // Gives back what was promised and not taken.
    void withdraw(int blocks);
    // Takes one promised block, with one reference. Throws std::logic_error when none is promised.
    [[nodiscard]] int32_t take_promised();
    // One more holder of a block in use.
    void retain(int32_t block);
    // One holder less; the last one frees it.
    void release(int32_t block);

    // Throws std::logic_error that says what is wrong: a block both free and in use, one lost, a broken
    // promise.
    void check_integrity() const;

private:
    [[nodiscard]] size_t checked(int32_t block) const;

    std::vector<int32_t> references_;  // by block; 0: free
    std::vector<int32_t> free_;        // a stack, so that warm blocks are used again first
    int promised_ = 0;
};

}  // namespace castiron
