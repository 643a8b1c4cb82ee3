// What an engine takes of a device's memory, and what is said when that is too much.
#pragma once

#include <cstdint>
#include <string>

#include "device/cuda/driver.h"
#include "device/cuda/probe.h"

namespace castiron::cuda {

struct MemoryPlan {
    uint64_t weights = 0;
    uint64_t arena = 0;
    uint64_t scratch = 0;  // of kernels
    uint64_t inputs = 0;
    uint64_t kv_block = 0;  // of one block, over all layers
    uint64_t adapters = 0;  // of all slots

    [[nodiscard]] uint64_t fixed() const { return weights + arena + scratch + inputs + adapters; }
};

// "1.5 GiB", "12.0 MiB", "300 B".
[[nodiscard]] std::string bytes_text(uint64_t bytes);

// Free bytes of the current context's device.
[[nodiscard]] uint64_t free_memory(const Driver& driver);

// Throws std::runtime_error with the plan's figures unless all but the KV pool, and one block of it, are
// free.
void check_fits(const MemoryPlan& plan, const Gpu& gpu, uint64_t free);

// The same message for an allocation that failed although the plan should fit. `what` is what was reserved.
[[noreturn]] void refuse_memory(const MemoryPlan& plan, const Gpu& gpu, uint64_t free,
                                const std::string& what);

}  // namespace castiron::cuda
