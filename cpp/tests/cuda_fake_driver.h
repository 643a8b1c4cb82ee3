// A CUDA driver that does nothing but remember: device memory is host memory, copies happen at once, launches
// are noted, graphs are lists of what was captured.
#pragma once

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "device/cuda/driver.h"

namespace castiron::testing {

namespace cu = castiron::cuda;

struct FakeLaunch {
    std::string function;
    std::array<unsigned, 3> grid{};
    unsigned threads = 0;
    unsigned shared_bytes = 0;
    void** params = nullptr;  // valid during the launch only

    template <typename T>
    [[nodiscard]] T param(size_t i) const {
        T value;
        std::memcpy(&value, params[i], sizeof(T));
        return value;
    }
};

// One machine with one GPU. The driver's functions have no state argument, so there is one at a time.
struct FakeCuda {
    FakeCuda() { instance = this; }
    ~FakeCuda() { instance = nullptr; }
    FakeCuda(const FakeCuda&) = delete;
    FakeCuda& operator=(const FakeCuda&) = delete;

    std::string name = "Fake GPU";
    int version = 13000;
    int major = 9;
    int minor = 0;
    int multiprocessors = 4;
    int max_shared = 100000;
    size_t total_memory = size_t{64} << 20;

    // Bytes of each parameter, by function.
    std::map<std::string, std::vector<size_t>> signatures;
    std::map<std::string, int> calls;            // by exported name
    std::map<std::string, cu::Result> failures;  // the next call of that name fails so
    std::vector<std::string> log;                // launches and copies in order
    std::function<void(const FakeLaunch&)> kernel = [](const FakeLaunch&) {};
    std::set<void*> live;
    size_t used = 0;

    [[nodiscard]] cu::Driver driver() const;

    // --- what follows is for the functions below ---
    static inline FakeCuda* instance = nullptr;
    std::map<cu::Address, size_t> device_memory;
    std::deque<std::string> functions;
    bool capturing = false;
    using Work = std::vector<std::function<void()>>;
    Work captured;
    std::deque<Work> graphs;

    cu::Result enter(const char* symbol) {
        ++calls[symbol];
        const auto failure = failures.find(symbol);
        if (failure == failures.end()) return cu::Result::kSuccess;
        const cu::Result result = failure->second;
        failures.erase(failure);
        return result;
    }
    cu::Result work(std::function<void()> action) {
        if (capturing) {
            captured.push_back(std::move(action));
        } else {
            action();
        }
        return cu::Result::kSuccess;
    }
};

namespace fake {

inline FakeCuda& self() {
    return *FakeCuda::instance;
}

// Enters by the name, and leaves where a failure was ordered.
#define FAKE_ENTER(symbol) \
    if (const cu::Result failure = self().enter(symbol); failure != cu::Result::kSuccess) return failure

inline cu::Result init(unsigned) {
    FAKE_ENTER("cuInit");
    return cu::Result::kSuccess;
}
inline cu::Result driver_version(int* version) {
    *version = self().version;
    return cu::Result::kSuccess;
}
inline cu::Result error_name(cu::Result, const char** name) {
    *name = "CUDA_ERROR_FAKE";
    return cu::Result::kSuccess;
}
inline cu::Result error_string(cu::Result, const char** text) {
    *text = "a fake error";
    return cu::Result::kSuccess;
}
inline cu::Result device_count(int* count) {
    *count = 1;
    return cu::Result::kSuccess;
}
inline cu::Result device_get(cu::DeviceHandle* device, int ordinal) {
    *device = ordinal;
    return cu::Result::kSuccess;
}
inline cu::Result device_name(char* name, int length, cu::DeviceHandle) {
    std::strncpy(name, self().name.c_str(), static_cast<size_t>(length));
    return cu::Result::kSuccess;
}
inline cu::Result device_memory(size_t* bytes, cu::DeviceHandle) {
    *bytes = self().total_memory;
    return cu::Result::kSuccess;
}
inline cu::Result device_attribute(int* value, cu::Attribute attribute, cu::DeviceHandle) {
    switch (attribute) {
        case cu::Attribute::kMajor:
            *value = self().major;
            break;
        case cu::Attribute::kMinor:
            *value = self().minor;
            break;
        case cu::Attribute::kMultiprocessors:
            *value = self().multiprocessors;
            break;
        case cu::Attribute::kMaxSharedOptin:
            *value = self().max_shared;
            break;
        default:
            return cu::Result::kInvalidValue;
    }
    return cu::Result::kSuccess;
}
inline cu::Result context_retain(cu::Context* context, cu::DeviceHandle) {
    FAKE_ENTER("cuDevicePrimaryCtxRetain");
    *context = reinterpret_cast<cu::Context>(std::uintptr_t{8});
    return cu::Result::kSuccess;
}
inline cu::Result context_release(cu::DeviceHandle) {
    FAKE_ENTER("cuDevicePrimaryCtxRelease");
    return cu::Result::kSuccess;
}
inline cu::Result context_set_current(cu::Context) {
    FAKE_ENTER("cuCtxSetCurrent");
    return cu::Result::kSuccess;
}
inline cu::Result memory_info(size_t* free, size_t* total) {
    *total = self().total_memory;
    *free = self().total_memory - self().used;
    return cu::Result::kSuccess;
}
inline cu::Result memory_alloc(cu::Address* address, size_t bytes) {
    FAKE_ENTER("cuMemAlloc");
    if (bytes > self().total_memory - self().used) return cu::Result::kOutOfMemory;
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(memory, 0xFF, bytes);
    *address = reinterpret_cast<cu::Address>(memory);
    self().device_memory[*address] = bytes;
    self().used += bytes;
    return cu::Result::kSuccess;
}
inline cu::Result memory_free(cu::Address address) {
    self().used -= self().device_memory.at(address);
    self().device_memory.erase(address);
    std::free(reinterpret_cast<void*>(address));
    return cu::Result::kSuccess;
}
inline cu::Result host_alloc(void** data, size_t bytes, unsigned) {
    FAKE_ENTER("cuMemHostAlloc");
    *data = std::malloc(bytes);
    self().live.insert(*data);
    return cu::Result::kSuccess;
}
inline cu::Result host_free(void* data) {
    self().live.erase(data);
    std::free(data);
    return cu::Result::kSuccess;
}
inline cu::Result copy(const char* symbol, void* to, const void* from, size_t bytes) {
    FAKE_ENTER(symbol);
    return self().work([=] {
        self().log.emplace_back(symbol);
        std::memcpy(to, from, bytes);
    });
}
inline cu::Result copy_to_device(cu::Address to, const void* from, size_t bytes, cu::StreamHandle) {
    return copy("cuMemcpyHtoDAsync", reinterpret_cast<void*>(to), from, bytes);
}
inline cu::Result copy_to_host(void* to, cu::Address from, size_t bytes, cu::StreamHandle) {
    return copy("cuMemcpyDtoHAsync", to, reinterpret_cast<void*>(from), bytes);
}
inline cu::Result copy_on_device(cu::Address to, cu::Address from, size_t bytes, cu::StreamHandle) {
    return copy("cuMemcpyDtoDAsync", reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
}
// Streams, events and modules are nothing but a place in memory.
template <typename Handle>
cu::Result make(Handle* handle) {
    *handle = reinterpret_cast<Handle>(std::malloc(1));
    self().live.insert(*handle);
    return cu::Result::kSuccess;
}
template <typename Handle>
cu::Result destroy(Handle handle) {
    self().live.erase(handle);
    std::free(handle);
    return cu::Result::kSuccess;
}
inline cu::Result stream_create(cu::StreamHandle* stream, unsigned) {
    return make(stream);
}
inline cu::Result stream_destroy(cu::StreamHandle stream) {
    return destroy(stream);
}
inline cu::Result stream_synchronize(cu::StreamHandle) {
    FAKE_ENTER("cuStreamSynchronize");
    return cu::Result::kSuccess;
}
inline cu::Result event_create(cu::EventHandle* event, unsigned) {
    return make(event);
}
inline cu::Result event_destroy(cu::EventHandle event) {
    return destroy(event);
}
inline cu::Result event_record(cu::EventHandle, cu::StreamHandle) {
    FAKE_ENTER("cuEventRecord");
    return cu::Result::kSuccess;
}
inline cu::Result event_synchronize(cu::EventHandle) {
    FAKE_ENTER("cuEventSynchronize");
    return cu::Result::kSuccess;
}
inline cu::Result module_load(cu::ModuleHandle* module, const void*, unsigned, cu::JitOption*, void**) {
    FAKE_ENTER("cuModuleLoadDataEx");
    return make(module);
}
inline cu::Result module_unload(cu::ModuleHandle module) {
    return destroy(module);
}
inline cu::Result module_function(cu::Function* function, cu::ModuleHandle, const char* name) {
    FAKE_ENTER("cuModuleGetFunction");
    self().functions.emplace_back(name);
    *function = reinterpret_cast<cu::Function>(&self().functions.back());
    return cu::Result::kSuccess;
}
inline cu::Result function_set(cu::Function, cu::FunctionAttribute, int) {
    FAKE_ENTER("cuFuncSetAttribute");
    return cu::Result::kSuccess;
}
inline cu::Result launch(cu::Function function, unsigned x, unsigned y, unsigned z, unsigned threads,
                         unsigned, unsigned, unsigned shared_bytes, cu::StreamHandle, void** params, void**) {
    FAKE_ENTER("cuLaunchKernel");
    const FakeLaunch launched{
        *reinterpret_cast<std::string*>(function), {x, y, z}, threads, shared_bytes, params};
    if (!self().capturing) {
        self().log.push_back(launched.function);
        self().kernel(launched);
        return cu::Result::kSuccess;
    }
    // Arguments are read when the launch is captured, as a driver does.
    auto copies = std::make_shared<std::vector<uint64_t>>();
    const std::vector<size_t>& sizes = self().signatures.at(launched.function);
    for (size_t i = 0; i < sizes.size(); ++i) std::memcpy(&copies->emplace_back(0), params[i], sizes[i]);
    return self().work([launched, copies] {
        std::vector<void*> pointers;
        for (uint64_t& bits : *copies) pointers.push_back(&bits);
        FakeLaunch again = launched;
        again.params = pointers.data();
        self().log.push_back(again.function);
        self().kernel(again);
    });
}
inline cu::Result capture_begin(cu::StreamHandle, cu::CaptureMode) {
    FAKE_ENTER("cuStreamBeginCapture");
    self().capturing = true;
    return cu::Result::kSuccess;
}
inline cu::Result capture_end(cu::StreamHandle, cu::GraphHandle* graph) {
    self().capturing = false;
    self().graphs.push_back(std::move(self().captured));
    self().captured.clear();
    *graph = reinterpret_cast<cu::GraphHandle>(&self().graphs.back());
    return cu::Result::kSuccess;
}
inline cu::Result graph_instantiate(cu::GraphExecHandle* exec, cu::GraphHandle graph, unsigned long long) {
    FAKE_ENTER("cuGraphInstantiate");
    *exec = reinterpret_cast<cu::GraphExecHandle>(graph);
    return cu::Result::kSuccess;
}
inline cu::Result graph_upload(cu::GraphExecHandle, cu::StreamHandle) {
    return cu::Result::kSuccess;
}
inline cu::Result graph_launch(cu::GraphExecHandle exec, cu::StreamHandle) {
    FAKE_ENTER("cuGraphLaunch");
    for (const auto& action : *reinterpret_cast<FakeCuda::Work*>(exec)) action();
    return cu::Result::kSuccess;
}
inline cu::Result graph_destroy(cu::GraphHandle) {
    return cu::Result::kSuccess;
}
inline cu::Result graph_exec_destroy(cu::GraphExecHandle) {
    return cu::Result::kSuccess;
}
#undef FAKE_ENTER

}  // namespace fake

inline cu::Driver FakeCuda::driver() const {
    cu::Driver table;
#define CASTIRON_FAKE(member, symbol, params) table.member = &fake::member;
    CASTIRON_CUDA_FUNCTIONS(CASTIRON_FAKE)
#undef CASTIRON_FAKE
    return table;
}

}  // namespace castiron::testing
