// What the driver gives out, owned: each is freed when its owner goes. The context must be current then.
#pragma once

#include <cstddef>
#include <utility>

#include "device/cuda/driver.h"

namespace castiron::cuda {

// A handle of type Handle that the driver's function `Destroy` takes back.
template <typename Handle, auto Destroy>
class Owned {
public:
    Owned() = default;
    Owned(const Driver& driver, Handle handle) : driver_(&driver), handle_(handle) {}
    Owned(Owned&& other) noexcept
        : driver_(std::exchange(other.driver_, nullptr)), handle_(std::exchange(other.handle_, Handle{})) {}
    Owned& operator=(Owned&& other) noexcept {
        std::swap(driver_, other.driver_);
        std::swap(handle_, other.handle_);
        return *this;
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() {
        // A lost context refuses; its memory is gone with it.
        if (driver_ != nullptr) static_cast<void>((driver_->*Destroy)(handle_));
    }

    [[nodiscard]] Handle get() const { return handle_; }

private:
    const Driver* driver_ = nullptr;
    Handle handle_{};
};

using Stream = Owned<StreamHandle, &Driver::stream_destroy>;
using Event = Owned<EventHandle, &Driver::event_destroy>;
using Module = Owned<ModuleHandle, &Driver::module_unload>;
using Graph = Owned<GraphHandle, &Driver::graph_destroy>;
using GraphExec = Owned<GraphExecHandle, &Driver::graph_exec_destroy>;
using DeviceBuffer = Owned<Address, &Driver::memory_free>;
using PinnedBuffer = Owned<void*, &Driver::host_free>;
using RetainedContext = Owned<DeviceHandle, &Driver::context_release>;

// A stream that does not wait for the default stream of others in the process.
[[nodiscard]] Stream make_stream(const Driver& driver);
[[nodiscard]] Event make_event(const Driver& driver);
// At least 256-byte aligned; the contents are undefined. 0 bytes give an empty buffer.
[[nodiscard]] DeviceBuffer make_device_buffer(const Driver& driver, uint64_t bytes);
// Host memory that copies to and from the device go through without another copy.
[[nodiscard]] PinnedBuffer make_pinned_buffer(const Driver& driver, uint64_t bytes);

// The device's primary context, which other libraries of the process share. Current on the thread that makes
// it.
class PrimaryContext {
public:
    PrimaryContext(const Driver& driver, int device_index);
    // For a thread that may not have it yet. One driver call.
    void make_current() const;
    [[nodiscard]] Context get() const { return context_; }

private:
    const Driver& driver_;
    RetainedContext retained_;
    Context context_ = nullptr;
};

}  // namespace castiron::cuda
