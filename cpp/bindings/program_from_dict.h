// engines.program.Program.model_dump() -> Program.
#pragma once

#include <nanobind/nanobind.h>

#include "program/program.h"

namespace castiron::bindings {

// Types, names, references and ranges are checked: ValueError says where. What a kernel needs of its operands
// is the device's to check. Weights have no data yet. `images` is a dict {entry of rank0.engine: bytes} with
// the kernels' machine code and PTX; None for a program without kernels.
[[nodiscard]] Program program_from_dict(nanobind::handle dict, nanobind::handle images);

}  // namespace castiron::bindings
