// Blocks whose contents go elsewhere before the next step.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace castiron {

// The contents of one block are to be copied to another.
struct BlockCopy {
    int32_t from = 0;
    int32_t to = 0;
};

// A copy inside a pool of one group of layers, between it and its host tier, or between that and its file:
// then one end or both are slots of those.
struct BlockMove {
    enum class Kind : uint8_t {
        kCopy,   // block to block
        kSave,   // block to slot
        kLoad,   // slot to block
        kSpill,  // slot to slot of the file
        kFetch,  // and back
    };
    Kind kind = Kind::kCopy;
    int32_t from = 0;
    int32_t to = 0;
    KvGroup group = KvGroup::kAll;

    bool operator==(const BlockMove&) const = default;
};

}  // namespace castiron
