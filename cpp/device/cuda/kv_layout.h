// Where keys and values of the cache lie (docs/cuda-program.md, "KV cache"); the twin of
// engines/cuda_layout.py.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"
#include "program/program.h"

namespace castiron::cuda {

struct KvLayout {
    std::array<uint64_t, 2> strides{};  // by KvGroup: bytes from one block to the next
    std::vector<uint64_t> k_offsets;    // of each layer's part inside a block of its group
    std::vector<uint64_t> v_offsets;

    [[nodiscard]] uint64_t stride(KvGroup group) const { return strides[static_cast<size_t>(group)]; }
};

// Throws std::invalid_argument for sizes or dtypes that no cache has.
[[nodiscard]] KvLayout kv_layout(std::span<const KvLayer> layers);

}  // namespace castiron::cuda
