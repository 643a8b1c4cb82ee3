// How many KV blocks a pool gets when nobody says.
#pragma once

#include <cstdint>
#include <string>

#include "kv/kv_window.h"
#include "program/program.h"

namespace castiron {

struct PoolSize {
    int blocks = 0;
    std::string limited_by;  // "option", "limits" (enough for every request at full length) or "memory"
    int window_blocks = 0;   // where some layers have a window; 0: nothing is kept apart
    int set_aside = 0;       // of them: for the chunks of a step (WindowPool)
};

// What a block takes, and what sequences read at a time.
struct KvShape {
    uint64_t block_bytes = 0;
    uint64_t window_block_bytes = 0;  // of the layers that have one; 0: none, or all
    KvWindow window;
};

// Memory in bytes that this process may still take: MemAvailable, or what is left under the cgroup's limit.
[[nodiscard]] uint64_t available_memory();

// Bytes that it takes.
[[nodiscard]] uint64_t bytes_of(const PoolSize& size, const KvShape& shape);

// What somebody asked for, one of them at most; or nothing.
struct PoolWish {
    int blocks = 0;
    uint64_t bytes = 0;
};

// As many blocks as are wished for, or fit into that many bytes (throws std::invalid_argument when
// `available` bytes cannot hold them, or not one fits); else enough for max_batch_size sequences of
// max_seq_len tokens, but no more than `by_default` bytes, and at least one block.
//
// Where some layers have a window, their window blocks are as many as max_batch_size sequences read at a time
// and an eighth of the blocks for the prefix cache; in a given memory no more than half of the blocks that it
// would hold if nothing were kept apart, so that it holds at least half as many short sequences. What they
// leave is for blocks. Where that is no gain nothing is kept apart.
[[nodiscard]] PoolSize choose_pool_size(const PoolWish& wish, const Limits& limits, const KvShape& shape,
                                        uint64_t available, uint64_t by_default);

}  // namespace castiron
