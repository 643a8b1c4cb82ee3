// LoRA adapters on the host: packed for the products of one program.
#pragma once

#include <cstdint>
#include <vector>

#include "device/adapter.h"
#include "device/host/kernels/table.h"
#include "device/host/memory.h"
#include "program/program.h"

namespace castiron::host {

// Whether the product's panels alternate gate and up; its columns are those of gate, then those of up.
[[nodiscard]] bool is_gated(const Step& step);

// Ranks of all modules of one product together, in whole panels: columns of its LoraStep::a at most.
[[nodiscard]] int64_t lora_columns(const Step& step, int max_rank);

// For each product the modules that it computes share one `a`, their ranks side by side; `b` holds for each
// panel of the product the ranks of its own modules alone. `scale` is multiplied into b.
class HostAdapter final : public Adapter {
public:
    // Throws std::invalid_argument where a module is not in the program, or where its pair does not fit.
    HostAdapter(const Program& program, const LoraModules& modules, int max_rank, bool huge_pages);

    [[nodiscard]] uint64_t bytes() const override { return memory_.size(); }
    [[nodiscard]] const Program* program() const { return program_; }
    // One for each step of the program.
    [[nodiscard]] const LoraStep* steps() const { return steps_.data(); }

private:
    const Program* program_;
    std::vector<LoraStep> steps_;
    std::vector<std::vector<LoraPanel>> panels_;
    HugeBuffer memory_;
};

}  // namespace castiron::host
