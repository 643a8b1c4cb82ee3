// Blocks whose contents go elsewhere before the next step.
#pragma once

#include <cstdint>

namespace castiron {

// The contents of one block are to be copied to another.
struct BlockCopy {
    int32_t from = 0;
    int32_t to = 0;
};

// A copy inside the pool, or between it and the host tier: then one end is a slot of that.
struct BlockMove {
    enum class Kind : uint8_t { kCopy, kSave, kLoad };  // block to block, block to slot, slot to block
    Kind kind = Kind::kCopy;
    int32_t from = 0;
    int32_t to = 0;
};

}  // namespace castiron
