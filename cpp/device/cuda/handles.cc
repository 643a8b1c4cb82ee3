#include "device/cuda/handles.h"

namespace castiron::cuda {

Stream make_stream(const Driver& driver) {
    StreamHandle stream = nullptr;
    check(driver, driver.stream_create(&stream, kStreamNonBlocking), "making a stream");
    return {driver, stream};
}

Event make_event(const Driver& driver) {
    EventHandle event = nullptr;
    check(driver, driver.event_create(&event, kEventDisableTiming), "making an event");
    return {driver, event};
}

DeviceBuffer make_device_buffer(const Driver& driver, uint64_t bytes) {
    if (bytes == 0) return {};
    Address address = 0;
    check(driver, driver.memory_alloc(&address, bytes), "reserving device memory");
    return {driver, address};
}

PinnedBuffer make_pinned_buffer(const Driver& driver, uint64_t bytes) {
    if (bytes == 0) return {};
    void* data = nullptr;
    const Result result = driver.host_alloc(&data, bytes, 0);
    if (result == Result::kOutOfMemory) {
        throw std::runtime_error(
            std::to_string(bytes) +
            " bytes of host memory cannot be pinned; free memory on the host, or rebuild "
            "the engine with smaller --max-num-tokens and --max-logit-rows");
    }
    check(driver, result, "reserving pinned host memory");
    return {driver, data};
}

PrimaryContext::PrimaryContext(const Driver& driver, int device_index) : driver_(driver) {
    DeviceHandle device = 0;
    check(driver, driver.device_get(&device, device_index), "opening the device");
    check(driver, driver.context_retain(&context_, device), "opening the device's context");
    retained_ = RetainedContext(driver, device);
    make_current();
}

void PrimaryContext::make_current() const {
    check(driver_, driver_.context_set_current(context_), "making the device's context current");
}

}  // namespace castiron::cuda
