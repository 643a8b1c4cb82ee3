// Where keys and values of the cache lie (docs/cuda-program.md, "KV cache"); the twin of
// engines/cuda_layout.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "program/program.h"

namespace castiron::cuda {

struct KvLayout {
    uint64_t block_stride = 0;        // bytes from one block to the next
    std::vector<uint64_t> k_offsets;  // of each layer's part inside a block
    std::vector<uint64_t> v_offsets;
};

// Throws std::invalid_argument for sizes or dtypes that no cache has.
[[nodiscard]] KvLayout kv_layout(std::span<const KvLayer> layers);

}  // namespace castiron::cuda
