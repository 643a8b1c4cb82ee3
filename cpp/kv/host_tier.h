// Blocks that the pool gave up, kept outside of it until they are wanted again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv/block_file.h"
#include "kv/block_move.h"
#include "kv/tier_slots.h"

namespace castiron {

// A number of slots in this machine's memory, each of the size of a block of a group, found by what the block
// depends on and given up by their last use: to a file, if there is one, from which they come back through
// memory. It plans what is to be copied; who runs the next step copies, and says when that is done. Not
// thread-safe: the engine thread owns it. Allocates in the constructor only.
class HostTier {
public:
    // memory: of `slots` blocks of block_bytes; it outlives this. disk: or null. group: whose blocks.
    HostTier(std::byte* memory, int slots, uint64_t block_bytes, std::unique_ptr<BlockFile> disk = nullptr,
             KvGroup group = KvGroup::kAll);

    [[nodiscard]] std::byte* data(int32_t slot) const {
        return memory_ + static_cast<uint64_t>(slot) * block_bytes_;
    }
    // Whether the block can be loaded now.
    [[nodiscard]] bool contains(const PathKey& key) const;
    // Adds what copies `block` here to the moves: nothing where it is here already, and where no slot can be
    // spared.
    void save(const PathKey& key, int32_t block, std::vector<BlockMove>& moves);
    // Adds what copies it back to `block`; false where it is not here.
    [[nodiscard]] bool load(const PathKey& key, int32_t block, std::vector<BlockMove>& moves);
    // Brings the block into memory, if it is on the disk, and keeps it there until unpin(); false where that
    // cannot be.
    [[nodiscard]] bool pin(const PathKey& key, std::vector<BlockMove>& moves);
    // Of all that are pinned.
    void unpin();
    // Makes a move that does not touch the pool. A disk that fails is not used any more: what was to be
    // written is lost. Throws std::runtime_error where something was to be read.
    void make(const BlockMove& move);
    // All of its own that was planned in `moves` is done.
    void settle(std::span<const BlockMove> moves);
    // What was planned and is not done will never be.
    void abandon_moves();
    // Forgets all blocks.
    void clear();
    // The most moves that come of one save or load.
    static constexpr int kMostMoves = 3;

    [[nodiscard]] int total() const { return slots_.total(); }
    [[nodiscard]] int filled() const { return slots_.filled(); }
    [[nodiscard]] int64_t saved() const { return saved_; }
    [[nodiscard]] int64_t loaded() const { return loaded_; }
    [[nodiscard]] int disk_total() const { return disk_slots_.total(); }
    [[nodiscard]] int disk_filled() const { return disk_slots_.filled(); }
    // Blocks that went to the disk, and that came back from it.
    [[nodiscard]] int64_t spilled() const { return spilled_; }
    [[nodiscard]] int64_t fetched() const { return fetched_; }
    // Why the disk is not used any more; empty: it is.
    [[nodiscard]] const std::string& disk_error() const { return disk_error_; }

private:
    [[nodiscard]] bool uses_disk() const { return disk_ != nullptr && disk_error_.empty(); }
    void spill(int32_t slot, std::vector<BlockMove>& moves);
    [[nodiscard]] int32_t bring(const PathKey& key, std::vector<BlockMove>& moves);

    std::byte* memory_;
    uint64_t block_bytes_;
    KvGroup group_;
    TierSlots slots_;
    std::vector<int32_t> pinned_;
    std::unique_ptr<BlockFile> disk_;
    TierSlots disk_slots_;
    int64_t saved_ = 0;
    int64_t loaded_ = 0;
    int64_t spilled_ = 0;
    int64_t fetched_ = 0;
    std::string disk_error_;
};

// Those of the groups of layers; null where nothing is kept.
struct HostTiers {
    HostTier* blocks = nullptr;
    HostTier* windows = nullptr;  // where some layers have a window

    [[nodiscard]] HostTier* of(KvGroup group) const { return group == KvGroup::kAll ? blocks : windows; }
    template <typename Call>
    void each(Call call) const {
        for (HostTier* tier : {blocks, windows}) {
            if (tier != nullptr) call(*tier);
        }
    }
};

}  // namespace castiron
