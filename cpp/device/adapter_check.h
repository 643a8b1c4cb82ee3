// Whether a LoRA adapter fits a program: the same for every device.
#pragma once

#include "device/adapter.h"
#include "program/program.h"

namespace castiron {

// Inputs of a product that adapters can add to.
[[nodiscard]] int64_t adapter_inputs(const Program& program, const Step& step);

// Throws std::invalid_argument that names the module: the program has no such one, its rank is over max_rank,
// or its matrices do not have the module's sizes.
void check_adapter(const Program& program, const LoraModules& modules, int max_rank);

}  // namespace castiron
