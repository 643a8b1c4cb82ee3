#include "device/cuda/kernel_set.h"

#include <array>
#include <cctype>
#include <cstdlib>

namespace castiron::cuda {
namespace {

// Architecture-specific machine code begins here (wgmma, tcgen05).
constexpr int kFirstSpecific = 90;

// The number at the end of "sm_90" or "compute_80"; 0 where there is none.
int architecture(const std::string& target) {
    const size_t at = target.find('_');
    return at == std::string::npos ? 0 : std::atoi(target.c_str() + at + 1);
}

// The word behind a PTX directive such as ".target", or nothing.
std::string directive(const std::string& ptx, const std::string& name) {
    size_t begin = ptx.find(name);
    if (begin == std::string::npos) return {};
    begin = ptx.find_first_not_of(" \t", begin + name.size());
    if (begin == std::string::npos) return {};
    return ptx.substr(begin, ptx.find_first_of(" \t\r\n,;", begin) - begin);
}

// "13.0": the toolkit whose assembler wrote the machine code, by the note that it leaves.
std::string toolkit(const std::string& image) {
    static constexpr std::string_view kNote = "Cuda compilation tools, release ";
    const size_t at = image.find(kNote);
    if (at == std::string::npos) return "an unknown release";
    const size_t begin = at + kNote.size();
    return "CUDA " + image.substr(begin, image.find_first_not_of("0123456789.", begin) - begin);
}

std::string driver_text(const Driver& driver) {
    int version = 0;
    static_cast<void>(driver.driver_version(&version));
    return "CUDA " + version_text(version);
}

[[noreturn]] void refuse_image(const Driver& driver, const Gpu& gpu, const Kernel& kernel, bool machine_code,
                               Result result, const char* log) {
    std::string message =
        "kernel \"" + kernel.name + "\" cannot be loaded on " + gpu.name + ": " + error_text(driver, result);
    if (machine_code) {
        message += ". Its machine code comes from " + toolkit(kernel.image) + ", the driver speaks " +
                   driver_text(driver) +
                   "; a driver of the same major release or later is expected (CUDA 12: 525, CUDA 13: 580): "
                   "update the driver";
    } else {
        message += ". Its PTX has version " + directive(kernel.ptx, ".version") + ", the driver speaks " +
                   driver_text(driver) +
                   ": update the driver, or rebuild the engine for this GPU (--target sm_" +
                   std::to_string(gpu.compute_capability) + ")";
    }
    if (log[0] != '\0') message += ". The driver's log: " + std::string(log);
    throw std::invalid_argument(message);
}

}  // namespace

bool machine_code_fits(const std::string& target, int compute_capability) {
    const int built = architecture(target);
    if (target.rfind("sm_", 0) != 0) return false;
    if (built >= kFirstSpecific) return built == compute_capability;
    return built / 10 == compute_capability / 10 && built <= compute_capability;
}

bool ptx_fits(const std::string& ptx, int compute_capability) {
    const std::string target = directive(ptx, ".target");
    const int built = architecture(target);
    if (built == 0) return false;
    const bool specific = std::isdigit(static_cast<unsigned char>(target.back())) == 0;
    return specific ? built == compute_capability : built <= compute_capability;
}

KernelSet::KernelSet(const Driver& driver, const Gpu& gpu, const Program& program) {
    const int max_shared = attribute(driver, gpu.index, Attribute::kMaxSharedOptin);
    modules_.reserve(program.kernels.size());
    functions_.reserve(program.kernels.size());
    for (const Kernel& kernel : program.kernels) load(driver, gpu, program, kernel, max_shared);
}

void KernelSet::load(const Driver& driver, const Gpu& gpu, const Program& program, const Kernel& kernel,
                     int max_shared) {
    const std::string where = "kernel \"" + kernel.name + "\"";
    if (kernel.threads < 1 || kernel.threads > 1024) {
        throw std::invalid_argument(where + " has blocks of " + std::to_string(kernel.threads) +
                                    " threads; 1 to 1024 are expected");
    }
    if (kernel.shared_bytes < 0 || kernel.shared_bytes > max_shared) {
        throw std::invalid_argument(where + " needs " + std::to_string(kernel.shared_bytes) +
                                    " bytes of shared memory; a block on " + gpu.name + " has at most " +
                                    std::to_string(max_shared));
    }
    const bool machine_code =
        !kernel.image.empty() && machine_code_fits(program.target, gpu.compute_capability);
    if (!machine_code && (kernel.ptx.empty() || !ptx_fits(kernel.ptx, gpu.compute_capability))) {
        throw std::invalid_argument(where + " has no code for " + gpu.name + " (compute capability " +
                                    version_text(gpu.compute_capability * 100) + "): it was built for " +
                                    program.target + "; rebuild the engine with --target sm_" +
                                    std::to_string(gpu.compute_capability) +
                                    " (or compute_80, if that is no target)");
    }
    std::array<char, 2048> log{};
    std::array options{JitOption::kErrorLog, JitOption::kErrorLogBytes};
    // The driver takes numbers in the place of pointers.
    std::array<void*, 2> values{log.data(), reinterpret_cast<void*>(log.size())};
    ModuleHandle module = nullptr;
    const void* image = machine_code ? kernel.image.data() : kernel.ptx.c_str();
    const Result loaded =
        driver.module_load(&module, image, machine_code ? 0 : 2, machine_code ? nullptr : options.data(),
                           machine_code ? nullptr : values.data());
    if (loaded == Result::kOutOfMemory) check(driver, loaded, "loading kernels");
    if (loaded != Result::kSuccess) refuse_image(driver, gpu, kernel, machine_code, loaded, log.data());
    modules_.emplace_back(driver, module);
    Function function = nullptr;
    const Result found = driver.module_function(&function, module, kernel.function.c_str());
    if (found == Result::kNotFound) {
        throw std::invalid_argument(where + ": its image has no function \"" + kernel.function +
                                    "\"; the engine is damaged or was made by hand");
    }
    check(driver, found, "finding a kernel's function");
    if (kernel.shared_bytes > 0) {
        check(driver,
              driver.function_set(function, FunctionAttribute::kMaxDynamicShared, kernel.shared_bytes),
              "setting a kernel's shared memory");
    }
    if (driver.function_load != nullptr) check(driver, driver.function_load(function), "loading a kernel");
    functions_.push_back(function);
}

}  // namespace castiron::cuda
