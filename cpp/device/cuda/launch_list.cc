#include "device/cuda/launch_list.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <utility>

#include "device/device.h"

namespace castiron::cuda {
namespace {

// Since compute capability 3.0 (CUDA C++ programming guide, "Technical specifications").
constexpr std::array<int64_t, 3> kMaxGrid{(int64_t{1} << 31) - 1, 65535, 65535};

// The place of the first of the program's own names in the input block; nothing for other values.
std::optional<StepInput> input_of(const Value& value) {
    if (value.name == "token_ids") return StepInput::kTokenIds;
    if (value.name == "positions") return StepInput::kPositions;
    if (value.name == "logit_rows") return StepInput::kLogitRows;
    return std::nullopt;
}

Kernel::Param param_of(Arg::Kind kind) {
    switch (kind) {
        case Arg::Kind::kSize:
        case Arg::Kind::kI32:
            return Kernel::Param::kI32;
        case Arg::Kind::kI64:
            return Kernel::Param::kI64;
        case Arg::Kind::kF32:
            return Kernel::Param::kF32;
        default:
            return Kernel::Param::kPtr;
    }
}

const char* param_text(Kernel::Param param) {
    switch (param) {
        case Kernel::Param::kPtr:
            return "ptr";
        case Kernel::Param::kI32:
            return "i32";
        case Kernel::Param::kI64:
            return "i64";
        case Kernel::Param::kF32:
            return "f32";
    }
    return "?";
}

bool is_symbol(int64_t symbol) {
    return symbol < 0 && symbol >= -static_cast<int64_t>(kNumSymbols);
}

// The largest counts under which the launch happens.
Counts largest_counts(const Program& program, const Launch& launch) {
    Counts largest = counts_at_limits(program);
    if (is_symbol(launch.when.of)) {
        const int64_t most = std::min<int64_t>(largest[launch.when.of], launch.when.high);
        largest[launch.when.of] = static_cast<int32_t>(most);
    }
    return largest;
}

int64_t scratch_of(const Program& program, const Launch& launch, const Gpu& gpu) {
    constexpr int64_t kMost = int64_t{1} << 40;
    const auto kernel = static_cast<size_t>(launch.kernel);
    if (kernel >= program.kernels.size()) return 0;  // launches are checked when prepared
    const Counts largest = largest_counts(program, launch);
    int64_t bytes = program.kernels[kernel].scratch_bytes;
    for (const GridDim& dim : launch.grid) {
        if (dim.per < 1 || (dim.of != 0 && !is_symbol(dim.of))) continue;
        const int64_t blocks = grid_blocks(dim, largest, gpu.multiprocessors);
        if (__builtin_mul_overflow(bytes, blocks, &bytes) || bytes > kMost) {
            throw std::invalid_argument("kernel \"" + program.kernels[kernel].name +
                                        "\" needs more scratch memory than any device has");
        }
    }
    return bytes;
}

}  // namespace

uint64_t scratch_bytes(const Program& program, const Gpu& gpu) {
    int64_t most = 0;
    for (const std::vector<Step>* steps : {&program.steps, &program.sampling, &program.feeding}) {
        for (const Step& step : *steps) {
            for (const std::vector<Launch>* launches : {&step.launches, &step.adapted}) {
                for (const Launch& launch : *launches)
                    most = std::max(most, scratch_of(program, launch, gpu));
            }
        }
    }
    return static_cast<uint64_t>(most);
}

LaunchList::LaunchList(const Program& program, std::span<const Step> steps, std::string name,
                       const FixedAddresses& fixed, StepArguments& arguments, const KernelSet& kernels,
                       const Gpu& gpu, Form form)
    : program_(program),
      steps_(steps),
      name_(std::move(name)),
      arguments_(arguments),
      multiprocessors_(gpu.multiprocessors) {
    for (size_t i = 0; i < steps.size(); ++i) {
        if (steps[i].launches.empty()) {
            throw std::invalid_argument(name_ + "[" + std::to_string(i) + "] (" + steps[i].kernel +
                                        ") has no launches; a step of a CUDA program has at least one");
        }
        const bool adapted = form == Form::kAdapted && !steps[i].adapted.empty();
        for (const Launch& launch : adapted ? steps[i].adapted : steps[i].launches) {
            add(static_cast<int>(i), launch, fixed, kernels);
        }
    }
    for (const size_t at : constant_parameters_) {
        parameters_[at] = &constants_[reinterpret_cast<uintptr_t>(parameters_[at])];
    }
}

void LaunchList::add(int step, const Launch& launch, const FixedAddresses& fixed, const KernelSet& kernels) {
    if (launch.kernel < 0 || static_cast<size_t>(launch.kernel) >= program_.kernels.size()) {
        throw std::invalid_argument(name_ + "[" + std::to_string(step) + "] launches kernel " +
                                    std::to_string(launch.kernel) + " of " +
                                    std::to_string(program_.kernels.size()));
    }
    const Kernel& kernel = program_.kernels[static_cast<size_t>(launch.kernel)];
    const std::string where = describe(step, launch.kernel);
    if (launch.args.size() != kernel.params.size()) {
        throw std::invalid_argument(where + ": " + std::to_string(launch.args.size()) +
                                    " arguments for a kernel of " + std::to_string(kernel.params.size()) +
                                    " parameters");
    }
    check_grid(launch, where);
    Prepared prepared;
    prepared.function = kernels[launch.kernel];
    prepared.threads = static_cast<unsigned>(kernel.threads);
    prepared.shared_bytes = static_cast<unsigned>(kernel.shared_bytes);
    std::copy(launch.grid.begin(), launch.grid.end(), prepared.grid.begin());
    prepared.when = launch.when;
    prepared.first_parameter = parameters_.size();
    prepared.step = step;
    prepared.kernel = launch.kernel;
    for (size_t i = 0; i < launch.args.size(); ++i) {
        add_argument(launch.args[i], kernel.params[i], fixed, where + ", argument " + std::to_string(i));
    }
    for (int i = 0; i < kernel.hidden_pointers; ++i) {
        add_constant(i == 0 && kernel.scratch_bytes > 0 ? fixed.scratch : 0);
    }
    launches_.push_back(prepared);
}

void LaunchList::add_argument(const Arg& arg, Kernel::Param param, const FixedAddresses& fixed,
                              const std::string& where) {
    if (param_of(arg.kind) != param) {
        throw std::invalid_argument(where + " is of type " + param_text(param_of(arg.kind)) +
                                    "; the kernel's parameter is " + param_text(param));
    }
    const auto index = [&](size_t count, const char* what) {
        if (arg.index < 0 || static_cast<size_t>(arg.index) >= count) {
            throw std::invalid_argument(where + " names " + what + " " + std::to_string(arg.index) + " of " +
                                        std::to_string(count));
        }
        return static_cast<size_t>(arg.index);
    };
    switch (arg.kind) {
        case Arg::Kind::kValue: {
            const size_t value = index(program_.values.size(), "value");
            if (const auto input = input_of(program_.values[value])) {
                parameters_.push_back(&arguments_.inputs[static_cast<size_t>(*input)]);
            } else {
                add_constant(fixed.values[value]);
            }
            break;
        }
        case Arg::Kind::kWeight:
            add_constant(fixed.weights[index(program_.weights.size(), "weight")]);
            break;
        case Arg::Kind::kAdapter:
            if (fixed.adapters == 0)
                throw std::invalid_argument(where + " is an adapter's, and there are none");
            add_constant(fixed.adapters + index(program_.adapters.slot_bytes, "byte of a slot"));
            break;
        case Arg::Kind::kInput:
            parameters_.push_back(&arguments_.inputs[index(kNumInputs, "step input")]);
            break;
        case Arg::Kind::kKCache:
            parameters_.push_back(&arguments_.k_cache[index(program_.kv_layers.size(), "KV layer")]);
            break;
        case Arg::Kind::kVCache:
            parameters_.push_back(&arguments_.v_cache[index(program_.kv_layers.size(), "KV layer")]);
            break;
        case Arg::Kind::kSize:
            if (!is_symbol(arg.index)) throw std::invalid_argument(where + " is the size of no symbol");
            parameters_.push_back(&arguments_.counts[arg.index]);
            break;
        case Arg::Kind::kI32:
            add_constant(static_cast<uint32_t>(static_cast<int32_t>(arg.index)));
            break;
        case Arg::Kind::kI64:
            add_constant(static_cast<uint64_t>(arg.index));
            break;
        case Arg::Kind::kF32:
            add_constant(std::bit_cast<uint32_t>(arg.number));
            break;
    }
}

void LaunchList::add_constant(uint64_t bits) {
    constant_parameters_.push_back(parameters_.size());
    parameters_.push_back(reinterpret_cast<void*>(constants_.size()));
    constants_.push_back(bits);
}

void LaunchList::check_grid(const Launch& launch, const std::string& where) const {
    if (launch.grid.empty() || launch.grid.size() > kMaxGrid.size()) {
        throw std::invalid_argument(where + ": a grid has 1 to 3 dimensions, not " +
                                    std::to_string(launch.grid.size()));
    }
    if (launch.when.of != 0 && !is_symbol(launch.when.of)) {
        throw std::invalid_argument(where + ": its condition is on no symbol");
    }
    const Counts largest = largest_counts(program_, launch);
    for (size_t i = 0; i < launch.grid.size(); ++i) {
        const GridDim& dim = launch.grid[i];
        if ((dim.of != 0 && !is_symbol(dim.of)) || dim.per < 1 || dim.times < 1 || dim.per_sm < 0) {
            throw std::invalid_argument(where + ": grid dimension " + std::to_string(i) + " is malformed");
        }
        const int64_t blocks = grid_blocks(dim, largest, multiprocessors_);
        if (blocks > kMaxGrid[i]) {
            throw std::invalid_argument(where + ": grid dimension " + std::to_string(i) + " reaches " +
                                        std::to_string(blocks) + " blocks; at most " +
                                        std::to_string(kMaxGrid[i]) +
                                        " are possible: rebuild the engine with smaller limits");
        }
    }
}

void LaunchList::enqueue(const Driver& driver, StreamHandle stream) const {
    const Counts& counts = arguments_.counts;
    for (const Prepared& launch : launches_) {
        if (!happens(launch.when, counts)) continue;
        const int64_t x = grid_blocks(launch.grid[0], counts, multiprocessors_);
        const int64_t y = grid_blocks(launch.grid[1], counts, multiprocessors_);
        const int64_t z = grid_blocks(launch.grid[2], counts, multiprocessors_);
        if (x == 0 || y == 0 || z == 0) continue;
        void* const* parameters = parameters_.data() + launch.first_parameter;
        const Result result = driver.launch(
            launch.function, static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z),
            launch.threads, 1, 1, launch.shared_bytes, stream, const_cast<void**>(parameters), nullptr);
        if (result != Result::kSuccess) fail(driver, launch, result);
    }
}

std::string LaunchList::describe(int step, int kernel) const {
    return name_ + "[" + std::to_string(step) + "] (" + steps_[static_cast<size_t>(step)].kernel +
           "), kernel \"" + program_.kernels[static_cast<size_t>(kernel)].name + "\"";
}

void LaunchList::fail(const Driver& driver, const Prepared& launch, Result result) const {
    check(driver, result, ("launching " + describe(launch.step, launch.kernel)).c_str());
    std::abort();  // check() throws for every result but success
}

}  // namespace castiron::cuda
