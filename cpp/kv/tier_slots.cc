#include "kv/tier_slots.h"

namespace castiron {

int32_t TierSlots::spare() const {
    int32_t slot = slots_.oldest();
    while (slot != kNone && moving_[static_cast<size_t>(slot)] > 0) slot = slots_.next(slot);
    return slot;
}

void TierSlots::write(int32_t slot, const PathKey& key) {
    slots_.assign(slot, key);
    ++moving_[static_cast<size_t>(slot)];
}

void TierSlots::read(int32_t slot) {
    slots_.touch(slot);
    ++moving_[static_cast<size_t>(slot)];
}

void TierSlots::abandon() {
    for (int32_t slot = 0; slot < total(); ++slot) {
        if (moving_[static_cast<size_t>(slot)] == 0) continue;
        slots_.clear(slot);
        moving_[static_cast<size_t>(slot)] = 0;
    }
}

void TierSlots::clear() {
    for (int32_t slot = 0; slot < total(); ++slot) slots_.clear(slot);
}

}  // namespace castiron
