#include "kv/host_tier.h"

#include <stdexcept>
#include <utility>

namespace castiron {

using Kind = BlockMove::Kind;

HostTier::HostTier(std::byte* memory, int slots, uint64_t block_bytes, std::unique_ptr<BlockFile> disk,
                   KvGroup group)
    : memory_(memory),
      block_bytes_(block_bytes),
      group_(group),
      slots_(slots),
      disk_(std::move(disk)),
      disk_slots_(disk_ == nullptr ? 0 : disk_->slots()) {
    pinned_.reserve(static_cast<size_t>(slots));
}

bool HostTier::contains(const PathKey& key) const {
    return slots_.find(key) != TierSlots::kNone ||
           (uses_disk() && disk_slots_.find(key) != TierSlots::kNone && slots_.spare() != TierSlots::kNone);
}

// The slot is to be given to another block: what it holds goes to the disk, unless it is there.
void HostTier::spill(int32_t slot, std::vector<BlockMove>& moves) {
    if (!uses_disk() || !slots_.is_filled(slot)) return;
    const PathKey& key = slots_.key(slot);
    if (const int32_t known = disk_slots_.find(key); known != TierSlots::kNone) {
        return disk_slots_.touch(known);
    }
    const int32_t to = disk_slots_.spare();
    if (to == TierSlots::kNone) return;
    disk_slots_.write(to, key);
    moves.push_back({Kind::kSpill, slot, to, group_});
    ++spilled_;
}

void HostTier::save(const PathKey& key, int32_t block, std::vector<BlockMove>& moves) {
    if (const int32_t known = slots_.find(key); known != TierSlots::kNone) return slots_.touch(known);
    const int32_t slot = slots_.spare();
    if (slot == TierSlots::kNone) return;
    spill(slot, moves);
    slots_.write(slot, key);
    moves.push_back({Kind::kSave, block, slot, group_});
    ++saved_;
}

// The slot in memory that has the block, or will have it; kNone where that cannot be.
int32_t HostTier::bring(const PathKey& key, std::vector<BlockMove>& moves) {
    if (!contains(key)) return TierSlots::kNone;
    if (const int32_t known = slots_.find(key); known != TierSlots::kNone) return known;
    const int32_t from = disk_slots_.find(key);
    disk_slots_.read(from);  // first, so that it is not spilled to
    const int32_t slot = slots_.spare();
    spill(slot, moves);
    slots_.write(slot, key);
    moves.push_back({Kind::kFetch, from, slot, group_});
    ++fetched_;
    return slot;
}

bool HostTier::load(const PathKey& key, int32_t block, std::vector<BlockMove>& moves) {
    const int32_t slot = bring(key, moves);
    if (slot == TierSlots::kNone) return false;
    slots_.read(slot);
    moves.push_back({Kind::kLoad, slot, block, group_});
    ++loaded_;
    return true;
}

bool HostTier::pin(const PathKey& key, std::vector<BlockMove>& moves) {
    const int32_t slot = bring(key, moves);
    if (slot == TierSlots::kNone) return false;
    slots_.read(slot);
    pinned_.push_back(slot);
    return true;
}

void HostTier::unpin() {
    for (const int32_t slot : pinned_) slots_.done(slot);
    pinned_.clear();
}

void HostTier::make(const BlockMove& move) {
    const bool reads = move.kind == Kind::kFetch;
    try {
        if (!disk_error_.empty()) throw std::runtime_error(disk_error_);
        if (reads) {
            disk_->read(move.from, data(move.to));
        } else {
            disk_->write(move.to, data(move.from));
        }
    } catch (const std::runtime_error& error) {
        disk_error_ = error.what();
        if (reads) throw;
    }
}

void HostTier::settle(std::span<const BlockMove> moves) {
    for (const BlockMove& move : moves) {
        if (move.group != group_) continue;
        switch (move.kind) {
            case Kind::kCopy:
                break;
            case Kind::kSave:
                slots_.done(move.to);
                break;
            case Kind::kLoad:
                slots_.done(move.from);
                break;
            case Kind::kSpill:
                disk_slots_.done(move.to);
                break;
            case Kind::kFetch:
                disk_slots_.done(move.from);
                slots_.done(move.to);
                break;
        }
    }
}

void HostTier::abandon_moves() {
    slots_.abandon();
    disk_slots_.abandon();
}

void HostTier::clear() {
    slots_.clear();
    disk_slots_.clear();
}

}  // namespace castiron
