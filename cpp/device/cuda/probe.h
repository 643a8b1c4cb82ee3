// What GPUs this machine has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/cuda/driver.h"

namespace castiron::cuda {

struct Gpu {
    int index = 0;
    std::string name;
    int compute_capability = 0;  // ten times major plus minor
    uint64_t total_memory = 0;   // bytes
    int multiprocessors = 0;
};

struct Probe {
    int driver = 0;     // the CUDA version that it speaks: 13000 is 13.0; 0 where there is none
    std::string error;  // why there are no devices
    std::vector<Gpu> gpus;
};

// Never throws for want of a GPU or a driver.
[[nodiscard]] Probe probe();

// One device. Throws std::invalid_argument when there is no such index.
[[nodiscard]] Gpu describe(const Driver& driver, int index);

// A device's attribute by its index.
[[nodiscard]] int attribute(const Driver& driver, int index, Attribute which);

}  // namespace castiron::cuda
