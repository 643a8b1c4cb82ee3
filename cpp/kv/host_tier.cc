#include "kv/host_tier.h"

namespace castiron {

HostTier::HostTier(std::byte* memory, int slots, uint64_t block_bytes)
    : memory_(memory), block_bytes_(block_bytes), slots_(slots), moving_(static_cast<size_t>(slots), 0) {}

int32_t HostTier::save(const PathKey& key) {
    if (const int32_t known = slots_.find(key); known != kNone) {
        slots_.touch(known);
        return kNone;
    }
    int32_t slot = slots_.oldest();
    while (slot != kNone && moving_[static_cast<size_t>(slot)] > 0) slot = slots_.next(slot);
    if (slot == kNone) return kNone;
    slots_.assign(slot, key);
    ++moving_[static_cast<size_t>(slot)];
    ++saved_;
    return slot;
}

int32_t HostTier::load(const PathKey& key) {
    const int32_t slot = slots_.find(key);
    if (slot == kNone) return kNone;
    slots_.touch(slot);
    ++moving_[static_cast<size_t>(slot)];
    ++loaded_;
    return slot;
}

void HostTier::settle(std::span<const BlockMove> moves) {
    for (const BlockMove& move : moves) {
        if (move.kind == BlockMove::Kind::kSave) --moving_[static_cast<size_t>(move.to)];
        if (move.kind == BlockMove::Kind::kLoad) --moving_[static_cast<size_t>(move.from)];
    }
}

void HostTier::abandon_moves() {
    for (int32_t slot = 0; slot < total(); ++slot) {
        if (moving_[static_cast<size_t>(slot)] == 0) continue;
        slots_.clear(slot);
        moving_[static_cast<size_t>(slot)] = 0;
    }
}

void HostTier::clear() {
    for (int32_t slot = 0; slot < total(); ++slot) slots_.clear(slot);
}

}  // namespace castiron
