#include "device/cuda/memory_plan.h"

#include <array>
#include <cstdio>
#include <stdexcept>

namespace castiron::cuda {

std::string bytes_text(uint64_t bytes) {
    static constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB"};
    if (bytes < 1024) return std::to_string(bytes) + " B";
    double size = static_cast<double>(bytes) / 1024;
    size_t unit = 0;
    while (size >= 1024 && unit + 1 < kUnits.size()) {
        size /= 1024;
        ++unit;
    }
    std::array<char, 32> text{};
    static_cast<void>(std::snprintf(text.data(), text.size(), "%.1f %s", size, kUnits[unit]));
    return text.data();
}

uint64_t free_memory(const Driver& driver) {
    size_t free = 0;
    size_t total = 0;
    check(driver, driver.memory_info(&free, &total), "asking for free memory");
    return free;
}

void check_fits(const MemoryPlan& plan, const Gpu& gpu, uint64_t free) {
    if (plan.fixed() + plan.kv_block > free) refuse_memory(plan, gpu, free, "the engine");
}

void refuse_memory(const MemoryPlan& plan, const Gpu& gpu, uint64_t free, const std::string& what) {
    throw std::runtime_error(
        what + " does not fit into the memory of device " + std::to_string(gpu.index) + " (" + gpu.name +
        ", " + bytes_text(gpu.total_memory) + ", of which " + bytes_text(free) + " are free): weights take " +
        bytes_text(plan.weights) + ", activations " + bytes_text(plan.arena + plan.scratch) +
        ", step inputs " + bytes_text(plan.inputs) +
        (plan.adapters > 0 ? ", LoRA adapters " + bytes_text(plan.adapters) : "") + ", each KV block " +
        bytes_text(plan.kv_block) +
        "; free memory on the device, choose another one (device_index), or rebuild the engine with smaller "
        "--max-num-tokens and --max-batch-size" +
        (plan.adapters > 0 ? ", or start with fewer --max-loras" : ""));
}

}  // namespace castiron::cuda
