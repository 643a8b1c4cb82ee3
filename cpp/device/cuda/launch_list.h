// The launches of a program with all that can be known before a step runs already in place.
#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

#include "device/cuda/counts.h"
#include "device/cuda/driver.h"
#include "device/cuda/input_block.h"
#include "device/cuda/kernel_set.h"

namespace castiron::cuda {

// What differs from step to step. Arguments of launches point here, so that a step changes a few numbers once
// and no launch needs to be touched.
struct StepArguments {
    Counts counts;
    std::array<Address, kNumInputs> inputs{};
    std::vector<Address> k_cache;  // of each layer, in block 0
    std::vector<Address> v_cache;
};

// Addresses that stay.
struct FixedAddresses {
    std::vector<Address> values;
    std::vector<Address> weights;
    Address scratch = 0;   // of scratch_bytes()
    Address adapters = 0;  // the first slot
};

// Device memory that kernels want beside their arguments: for the largest grid of each launch. Launches run
// one after the other, so one buffer serves all.
[[nodiscard]] uint64_t scratch_bytes(const Program& program, const Gpu& gpu);

// Which of a step's launches: its own, or those of a step in which rows have adapters.
enum class Form : uint8_t { kPlain, kAdapted };

class LaunchList {
public:
    // `name` is what the steps are called in messages. `arguments` must outlive the list and stay where it
    // is. Throws std::invalid_argument for a launch that does not fit its kernel, or whose grid no device can
    // have.
    LaunchList(const Program& program, std::span<const Step> steps, std::string name,
               const FixedAddresses& fixed, StepArguments& arguments, const KernelSet& kernels,
               const Gpu& gpu, Form form = Form::kPlain);
    LaunchList(const LaunchList&) = delete;
    LaunchList& operator=(const LaunchList&) = delete;

    // Enqueues the launches of a step with the arguments' counts. Throws what check() does, naming step and
    // kernel.
    void enqueue(const Driver& driver, StreamHandle stream) const;

    [[nodiscard]] bool empty() const { return launches_.empty(); }

private:
    struct Prepared {
        Function function = nullptr;
        unsigned threads = 0;
        unsigned shared_bytes = 0;
        std::array<GridDim, 3> grid;
        When when;
        size_t first_parameter = 0;
        int step = 0;
        int kernel = 0;
    };

    void add(int step, const Launch& launch, const FixedAddresses& fixed, const KernelSet& kernels);
    void add_argument(const Arg& arg, Kernel::Param param, const FixedAddresses& fixed,
                      const std::string& where);
    void add_constant(uint64_t bits);
    void check_grid(const Launch& launch, const std::string& where) const;
    [[nodiscard]] std::string describe(int step, int kernel) const;
    [[noreturn]] void fail(const Driver& driver, const Prepared& launch, Result result) const;

    const Program& program_;
    std::span<const Step> steps_;
    std::string name_;
    StepArguments& arguments_;
    int multiprocessors_;
    std::vector<Prepared> launches_;
    // Of constants, parameters hold an index into constants_ until the last one is added.
    std::vector<uint64_t> constants_;
    std::vector<size_t> constant_parameters_;
    std::vector<void*> parameters_;
};

}  // namespace castiron::cuda
