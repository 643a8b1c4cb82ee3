// Which values only products of bf16 read: those who make them leave rows of bf16, and no product rounds them
// in a phase of its own. The bits are the same.
#pragma once

#include <span>

#include "device/host/operand.h"

namespace castiron::host {

// Sets Operand::may_round.
void find_rounded_values(const Program& program, std::span<Operand> values);

}  // namespace castiron::host
