// Slots that blocks are copied to and from, and which of them are in use by copies.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/keyed_slots.h"

namespace castiron {

// Which block each slot of a tier holds. A slot is *moving* while a copy to or from it is planned and not
// done: it is not given to another block then. Allocates in the constructor only.
class TierSlots {
public:
    static constexpr int32_t kNone = KeyedSlots::kNone;

    explicit TierSlots(int count) : slots_(count), moving_(static_cast<size_t>(count), 0) {}

    [[nodiscard]] int total() const { return slots_.total(); }
    [[nodiscard]] int filled() const { return slots_.filled(); }
    [[nodiscard]] bool is_filled(int32_t slot) const { return slots_.is_filled(slot); }
    [[nodiscard]] const PathKey& key(int32_t slot) const { return slots_.key(slot); }
    [[nodiscard]] int32_t find(const PathKey& key) const { return slots_.find(key); }
    // The slot that can best be given to another block; none where all are moving.
    [[nodiscard]] int32_t spare() const;
    void touch(int32_t slot) { slots_.touch(slot); }
    // A copy to the slot is planned, of a block that no other slot has.
    void write(int32_t slot, const PathKey& key);
    // A copy from it is.
    void read(int32_t slot);
    // One of its copies is done.
    void done(int32_t slot) { --moving_[static_cast<size_t>(slot)]; }
    // What was planned and is not done will never be: slots that were moving hold nothing.
    void abandon();
    void clear();

private:
    KeyedSlots slots_;
    std::vector<int32_t> moving_;  // by slot: copies
};

}  // namespace castiron
