#include "device/cuda/driver.h"

#include <dlfcn.h>

#include "device/device.h"

namespace castiron::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

Driver open_driver() {
    // Never closed: the driver runs threads of its own.
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* why = dlerror();
        throw std::runtime_error(std::string("the NVIDIA driver's library ") + kLibrary +
                                 " cannot be loaded (" + (why != nullptr ? why : "no reason given") +
                                 "); a CUDA target needs an NVIDIA GPU with driver 525 or later: install the "
                                 "driver, in a container run with --gpus all, or choose the host target");
    }
    Driver driver;
    const auto find = [&](auto& member, const char* symbol) {
        void* address = dlsym(library, symbol);
        if (address == nullptr) {
            throw std::runtime_error(std::string(kLibrary) + " lacks the function " + symbol +
                                     "; the driver is older than 525 (CUDA 12.0): update it");
        }
        member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(address);
    };
#define CASTIRON_FIND(member, symbol, params) find(driver.member, symbol);
    CASTIRON_CUDA_FUNCTIONS(CASTIRON_FIND)
#undef CASTIRON_FIND
    driver.function_load = reinterpret_cast<Result (*)(Function)>(dlsym(library, "cuFuncLoad"));
    const Result result = driver.init(0);
    if (result == Result::kNoDevice) {
        throw std::runtime_error(
            "the NVIDIA driver finds no GPU; expected at least one: look at nvidia-smi and at "
            "CUDA_VISIBLE_DEVICES, or choose the host target");
    }
    if (result != Result::kSuccess) {
        throw std::runtime_error("the NVIDIA driver does not start: " + error_text(driver, result) +
                                 "; see nvidia-smi for its state");
    }
    return driver;
}

}  // namespace

const Driver& load_driver() {
    static const Driver driver = open_driver();  // a failure is tried again at the next call
    return driver;
}

std::string error_text(const Driver& driver, Result result) {
    const char* name = nullptr;
    const char* text = nullptr;
    if (driver.error_name(result, &name) != Result::kSuccess || name == nullptr) name = "an unknown error";
    if (driver.error_string(result, &text) != Result::kSuccess || text == nullptr) text = "no description";
    return std::string(text) + " (" + name + ", " + std::to_string(static_cast<int>(result)) + ")";
}

bool is_sticky(Result result) {
    switch (result) {
        case Result::kEccUncorrectable:
        case Result::kNvlinkUncorrectable:
        case Result::kIllegalAddress:
        case Result::kLaunchTimeout:
        case Result::kContextIsDestroyed:
        case Result::kAssert:
        case Result::kHardwareStackError:
        case Result::kIllegalInstruction:
        case Result::kMisalignedAddress:
        case Result::kInvalidAddressSpace:
        case Result::kInvalidPc:
        case Result::kLaunchFailed:
            return true;
        default:
            return false;
    }
}

void check(const Driver& driver, Result result, const char* doing) {
    if (result == Result::kSuccess) return;
    const std::string message =
        "the CUDA driver failed while " + std::string(doing) + ": " + error_text(driver, result);
    if (is_sticky(result)) {
        throw DeviceLostError(message +
                              "; the device's context is lost and the process must be started again (with "
                              "CUDA_LAUNCH_BLOCKING=1 and CUDA graphs off the message names the kernel)");
    }
    throw CudaError(result, message);
}

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace castiron::cuda
