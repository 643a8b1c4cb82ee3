// What this CPU can run and which CPUs this process may use.
#pragma once

#include <string>
#include <string_view>

namespace castiron::host {

// Those with VNNI have products of integers of their own, and the float kernels of those without; those with
// BF16 have products of bf16 as well, and AMX has its own of all these.
enum class Isa { kPortable, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };

// From the plainest to the one that is chosen first.
inline constexpr Isa kAllIsas[] = {Isa::kPortable,   Isa::kAvx2,       Isa::kAvxVnni, Isa::kAvx512,
                                   Isa::kAvx512Vnni, Isa::kAvx512Bf16, Isa::kAmx};

[[nodiscard]] std::string_view isa_name(Isa isa);

// Whether the CPU and the operating system (saved register state) support the instruction set.
[[nodiscard]] bool cpu_supports(Isa isa);

// "" chooses the best supported one; a name forces it. Throws std::invalid_argument for an unknown name, or
// for an instruction set that this machine lacks.
[[nodiscard]] Isa choose_isa(const std::string& name);

// How many CPUs this process may run on, counting one per physical core where siblings are known: a second
// hardware thread adds nothing to kernels that already fill the vector units.
[[nodiscard]] int usable_cpus();

}  // namespace castiron::host
