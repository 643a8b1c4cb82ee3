// How many KV blocks a pool gets when nobody says.
#pragma once

#include <cstdint>
#include <string>

#include "program/program.h"

namespace castiron {

struct PoolSize {
    int blocks = 0;
    std::string limited_by;  // "option", "limits" (enough for every request at full length) or "memory"
};

// Memory in bytes that this process may still take: MemAvailable, or what is left under the cgroup's limit.
[[nodiscard]] uint64_t available_memory();

// `requested` blocks if > 0 (throws std::invalid_argument when `available` bytes cannot hold them); else
// enough for max_batch_size sequences of max_seq_len tokens, but no more than `by_default` bytes, and at
// least one block.
[[nodiscard]] PoolSize choose_pool_size(int requested, const Limits& limits, uint64_t block_bytes,
                                        uint64_t available, uint64_t by_default);

}  // namespace castiron
