// A step that is not sound would write into another request's cache: no device runs one.
#pragma once

#include "device/device.h"

namespace castiron {

// Throws std::invalid_argument unless the batch keeps the limits, its sequences cover the rows in order, and
// its block tables lie inside a pool of num_blocks blocks. has_cache: the program has KV layers.
void check_batch(const Batch& batch, const Limits& limits, bool has_cache, int num_blocks);

}  // namespace castiron
