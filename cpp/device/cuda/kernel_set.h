// A program's kernels on one device: machine code where it fits, else PTX that the driver compiles.
#pragma once

#include <string>
#include <vector>

#include "device/cuda/handles.h"
#include "device/cuda/probe.h"
#include "program/program.h"

namespace castiron::cuda {

// Whether machine code for `target` ("sm_90") runs on a device: code for sm_80 to sm_89 runs on later devices
// of the same major version; from sm_90 on Triton uses features of that one architecture.
[[nodiscard]] bool machine_code_fits(const std::string& target, int compute_capability);

// Whether the driver can compile the text for the device: its `.target` is no later architecture, and no
// architecture-specific one ("sm_90a") unless it is the device's own.
[[nodiscard]] bool ptx_fits(const std::string& ptx, int compute_capability);

class KernelSet {
public:
    KernelSet() = default;
    // Loads every kernel. Throws std::invalid_argument, with found, expected and fix, for a kernel that has
    // no image for the device, that the driver is too old for, or that needs more of a block than the device
    // has.
    KernelSet(const Driver& driver, const Gpu& gpu, const Program& program);

    [[nodiscard]] Function operator[](int kernel) const { return functions_[static_cast<size_t>(kernel)]; }

private:
    void load(const Driver& driver, const Gpu& gpu, const Program& program, const Kernel& kernel,
              int max_shared);

    std::vector<Module> modules_;
    std::vector<Function> functions_;
};

}  // namespace castiron::cuda
