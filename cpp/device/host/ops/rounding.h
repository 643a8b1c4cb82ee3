// Attributes x_format, x_group and x_scale of a step.
#pragma once

#include "device/host/step_checker.h"

namespace castiron::host {

// How rows of k inputs are rounded; step, zero and unit are left to the caller.
[[nodiscard]] Rounding read_rounding(StepChecker& step, int64_t k);

}  // namespace castiron::host
