#include "device/cuda/probe.h"

#include <array>

namespace castiron::cuda {
namespace {

DeviceHandle handle_of(const Driver& driver, int index) {
    int count = 0;
    check(driver, driver.device_count(&count), "counting the devices");
    if (index < 0 || index >= count) {
        throw std::invalid_argument("device_index is " + std::to_string(index) + "; this machine has " +
                                    std::to_string(count) + " CUDA devices, numbered from 0");
    }
    DeviceHandle device = 0;
    check(driver, driver.device_get(&device, index), "opening a device");
    return device;
}

}  // namespace

int attribute(const Driver& driver, int index, Attribute which) {
    int value = 0;
    check(driver, driver.device_attribute(&value, which, handle_of(driver, index)),
          "reading a device's attributes");
    return value;
}

Gpu describe(const Driver& driver, int index) {
    const DeviceHandle device = handle_of(driver, index);
    Gpu gpu;
    gpu.index = index;
    std::array<char, 256> name{};
    check(driver, driver.device_name(name.data(), static_cast<int>(name.size()) - 1, device),
          "reading a device's name");
    gpu.name = name.data();
    size_t bytes = 0;
    check(driver, driver.device_memory(&bytes, device), "reading a device's memory");
    gpu.total_memory = bytes;
    gpu.compute_capability =
        10 * attribute(driver, index, Attribute::kMajor) + attribute(driver, index, Attribute::kMinor);
    gpu.multiprocessors = attribute(driver, index, Attribute::kMultiprocessors);
    return gpu;
}

Probe probe() {
    Probe found;
    try {
        const Driver& driver = load_driver();
        check(driver, driver.driver_version(&found.driver), "reading its version");
        int count = 0;
        check(driver, driver.device_count(&count), "counting the devices");
        for (int i = 0; i < count; ++i) found.gpus.push_back(describe(driver, i));
        if (count == 0)
            found.error = "the NVIDIA driver finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES";
    } catch (const std::exception& error) {
        found.error = error.what();
    }
    return found;
}

}  // namespace castiron::cuda
