#include "kv/keyed_slots.h"

#include <bit>

namespace castiron {

PathKey path_key(const PathKey* parent, const CacheSalt& salt, std::span<const int32_t> tokens) {
    Blake2b hash;
    if (parent != nullptr) {
        hash.add(std::as_bytes(std::span(parent->digest)));
    } else {
        const std::array<uint64_t, 4> root{0, salt.high, salt.low, static_cast<uint64_t>(salt.adapter)};
        hash.add(std::as_bytes(std::span(root)));
    }
    hash.add(std::as_bytes(tokens));
    return {hash.finish()};
}

KeyedSlots::KeyedSlots(int count)
    : keys_(static_cast<size_t>(count)),
      filled_flags_(keys_.size(), 0),
      next_(keys_.size() + 1),
      previous_(keys_.size() + 1),
      table_(std::bit_ceil(2 * keys_.size() + 2), kNone) {
    for (int32_t slot = 0; slot <= count; ++slot) {
        next_[static_cast<size_t>(slot)] = slot == count ? 0 : slot + 1;
        previous_[static_cast<size_t>(slot)] = slot == 0 ? count : slot - 1;
    }
}

int32_t KeyedSlots::find(const PathKey& wanted) const {
    for (size_t at = home(wanted);; at = (at + 1) & (table_.size() - 1)) {
        const int32_t slot = table_[at];
        if (slot == kNone || key(slot) == wanted) return slot;
    }
}

void KeyedSlots::unlink(int32_t slot) {
    const int32_t before = previous_[static_cast<size_t>(slot)];
    const int32_t after = next_[static_cast<size_t>(slot)];
    next_[static_cast<size_t>(before)] = after;
    previous_[static_cast<size_t>(after)] = before;
}

void KeyedSlots::link_before(int32_t slot, int32_t after) {
    const int32_t before = previous_[static_cast<size_t>(after)];
    next_[static_cast<size_t>(before)] = previous_[static_cast<size_t>(after)] = slot;
    next_[static_cast<size_t>(slot)] = after;
    previous_[static_cast<size_t>(slot)] = before;
}

void KeyedSlots::touch(int32_t slot) {
    unlink(slot);
    link_before(slot, total());
}

void KeyedSlots::assign(int32_t slot, const PathKey& key) {
    clear(slot);
    keys_[static_cast<size_t>(slot)] = key;
    filled_flags_[static_cast<size_t>(slot)] = 1;
    ++filled_;
    size_t at = home(key);
    while (table_[at] != kNone) at = (at + 1) & (table_.size() - 1);
    table_[at] = slot;
    touch(slot);
}

void KeyedSlots::clear(int32_t slot) {
    if (!is_filled(slot)) return;
    const size_t mask = table_.size() - 1;
    size_t hole = home(key(slot));
    while (table_[hole] != slot) hole = (hole + 1) & mask;
    // What was pushed past the hole by it moves up, so that searches need no marks.
    for (size_t at = (hole + 1) & mask; table_[at] != kNone; at = (at + 1) & mask) {
        const size_t wanted = home(key(table_[at]));
        if (((at - wanted) & mask) < ((at - hole) & mask)) continue;
        table_[hole] = table_[at];
        hole = at;
    }
    table_[hole] = kNone;
    filled_flags_[static_cast<size_t>(slot)] = 0;
    --filled_;
    unlink(slot);
    link_before(slot, next_[keys_.size()]);
}

}  // namespace castiron
