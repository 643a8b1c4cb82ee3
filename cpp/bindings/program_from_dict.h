// engines.program.Program.model_dump() -> Program.
#pragma once

#include <nanobind/nanobind.h>

#include "program/program.h"

namespace castiron::bindings {

// Types, names, references and ranges are checked: ValueError says where. What a kernel needs of its operands
// is the device's to check. Weights have no data yet.
[[nodiscard]] Program program_from_dict(nanobind::handle dict);

}  // namespace castiron::bindings
