// A step that is not sound would write into another request's cache: no device runs one.
#pragma once

#include "device/device.h"

namespace castiron {

struct PoolBlocks {
    int blocks = 0;
    int window_blocks = 0;  // 0: none are kept apart
};

// Throws std::invalid_argument unless the batch keeps the limits, its sequences cover the rows in order, and
// its tables lie inside the pools. has_cache: the program has KV layers.
void check_batch(const Batch& batch, const Limits& limits, bool has_cache, const PoolBlocks& pools);

// Throws std::invalid_argument unless tokens come from rows of the step before, which had `rows` of them.
void check_token_sources(const Batch& batch, size_t rows);

// Throws std::invalid_argument unless every row of logits has an entry and all numbers are in range.
void check_sampling(const Batch& batch, const SamplingBatch& sampling, int vocab_size);

}  // namespace castiron
