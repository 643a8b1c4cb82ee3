#include "device/host/cpu.h"

#include <cpuid.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>

namespace castiron::host {
namespace {

struct Registers {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
    Registers r;
    if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
    return r;
}

bool bit(uint32_t word, int index) {
    return ((word >> index) & 1u) != 0;
}

// XCR0: the register states that the operating system saves. Needs OSXSAVE.
uint64_t saved_states() {
    uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<uint64_t>(high) << 32) | low;
}

// Whether Linux lets this process use the tiles of AMX: it reserves memory for them when asked.
bool may_use_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(2), since Linux 5.16
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool detect(Isa isa) {
    if (isa == Isa::kPortable) return true;
    const Registers one = cpuid(1);
    const bool osxsave = bit(one.ecx, 27);
    if (!osxsave) return false;
    const uint64_t states = saved_states();
    const Registers seven = cpuid(7);
    const bool ymm = (states & 0x6) == 0x6;
    const bool avx2 = bit(one.ecx, 28) && bit(one.ecx, 12) && bit(one.ecx, 29) && bit(seven.ebx, 5);
    if (isa == Isa::kAvx2) return ymm && avx2;
    if (isa == Isa::kAvxVnni) return ymm && avx2 && seven.eax >= 1 && bit(cpuid(7, 1).eax, 4);
    const bool zmm = (states & 0xe6) == 0xe6;
    // F, DQ, BW, VL: what every server core since Skylake has.
    const bool avx512 = bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) && bit(seven.ebx, 31);
    if (!(ymm && avx2 && zmm && avx512)) return false;
    if (isa == Isa::kAvx512) return true;
    const bool vnni = bit(seven.ecx, 11);
    if (isa == Isa::kAvx512Vnni) return vnni;
    const bool bf16 = seven.eax >= 1 && bit(cpuid(7, 1).eax, 5);
    if (isa == Isa::kAvx512Bf16) return vnni && bf16;
    const bool tiles = (states & 0x60000) == 0x60000;
    const bool amx = bit(seven.edx, 22) && bit(seven.edx, 24) && bit(seven.edx, 25);  // bf16, tiles, int8
    return vnni && tiles && bf16 && amx && may_use_tiles();
}

}  // namespace

std::string_view isa_name(Isa isa) {
    switch (isa) {
        case Isa::kPortable:
            return "portable";
        case Isa::kAvx2:
            return "avx2";
        case Isa::kAvxVnni:
            return "avxvnni";
        case Isa::kAvx512:
            return "avx512";
        case Isa::kAvx512Vnni:
            return "avx512vnni";
        case Isa::kAvx512Bf16:
            return "avx512bf16";
        case Isa::kAmx:
            return "amx";
    }
    return "?";
}

bool cpu_supports(Isa isa) {
    return detect(isa);
}

Isa choose_isa(const std::string& name) {
    if (name.empty()) {
        for (auto isa = std::rbegin(kAllIsas); *isa != Isa::kPortable; ++isa) {
            if (cpu_supports(*isa)) return *isa;
        }
        throw std::invalid_argument(
            "this CPU lacks AVX2, FMA or F16C, which the host target needs; run on an x86-64-v3 machine");
    }
    for (const Isa isa : kAllIsas) {
        if (name != isa_name(isa)) continue;
        if (!cpu_supports(isa)) {
            throw std::invalid_argument("isa '" + name +
                                        "' was asked for, but this machine does not support it");
        }
        return isa;
    }
    std::string expected;
    for (const Isa isa : kAllIsas) {
        if (isa != Isa::kPortable) expected += (expected.empty() ? "" : ", ") + std::string(isa_name(isa));
    }
    throw std::invalid_argument("unknown isa '" + name + "': expected " + expected + " or portable");
}

int usable_cpus() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int cpus = 0;
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(static_cast<size_t>(cpu), &set)) continue;
        std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                           "/topology/thread_siblings_list");
        std::string siblings;
        if (!std::getline(file, siblings) || cores.insert(siblings).second) ++cpus;
    }
    return std::max(cpus, 1);
}

}  // namespace castiron::host
