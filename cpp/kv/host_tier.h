// Blocks that the pool gave up, kept outside of it until they are wanted again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/block_move.h"
#include "kv/keyed_slots.h"

namespace castiron {

// A number of slots in this machine's memory, each of the size of a block, found by what the block depends on
// and given up by their last use. It plans what is to be copied; who runs the next step copies, and says when
// that is done: until then a slot is not given to another block. Not thread-safe: the engine thread owns it.
// Allocates in the constructor only.
class HostTier {
public:
    static constexpr int32_t kNone = KeyedSlots::kNone;

    // memory: of `slots` blocks of block_bytes; it outlives this.
    HostTier(std::byte* memory, int slots, uint64_t block_bytes);

    [[nodiscard]] std::byte* data(int32_t slot) const {
        return memory_ + static_cast<uint64_t>(slot) * block_bytes_;
    }
    [[nodiscard]] bool contains(const PathKey& key) const { return slots_.find(key) != kNone; }
    // The slot that the block is to be copied to. None where it is there already, and where no slot can be
    // spared.
    [[nodiscard]] int32_t save(const PathKey& key);
    // The slot that the block is to be copied from; none where it is not there.
    [[nodiscard]] int32_t load(const PathKey& key);
    // All that was planned in `moves` is done.
    void settle(std::span<const BlockMove> moves);
    // What was planned and is not done will never be.
    void abandon_moves();
    // Forgets all blocks.
    void clear();

    [[nodiscard]] int total() const { return slots_.total(); }
    [[nodiscard]] int filled() const { return slots_.filled(); }
    [[nodiscard]] int64_t saved() const { return saved_; }
    [[nodiscard]] int64_t loaded() const { return loaded_; }

private:
    std::byte* memory_;
    uint64_t block_bytes_;
    KeyedSlots slots_;
    std::vector<int32_t> moving_;  // by slot: copies to and from it that are planned and not done
    int64_t saved_ = 0;
    int64_t loaded_ = 0;
};

}  // namespace castiron
