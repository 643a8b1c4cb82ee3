// What tests call: configuration, the executor, counters, faults. Signatures are mirrored in
// ../virtual_driver.py.
#include <cstring>

#include "state.h"

using namespace vcuda;

namespace {

size_t copy_text(const std::string& text, char* out, size_t capacity) {
    if (out != nullptr && capacity > 0) {
        const size_t n = std::min(capacity - 1, text.size());
        std::memcpy(out, text.data(), n);
        out[n] = 0;
    }
    return text.size() + 1;
}

}  // namespace

extern "C" {

// Returns 0 for an unknown key.
int vcuda_configure(const char* key, int64_t value) {
    Config& config = state().config;
    const std::string name = key;
    if (name == "devices")
        config.devices = static_cast<int>(value);
    else if (name == "driver_version")
        config.driver_version = static_cast<int>(value);
    else if (name == "compute_capability")
        config.compute_capability = static_cast<int>(value);
    else if (name == "multiprocessors")
        config.multiprocessors = static_cast<int>(value);
    else if (name == "memory")
        config.memory = static_cast<uint64_t>(value);
    else if (name == "shared_optin")
        config.shared_optin = static_cast<int>(value);
    else
        return 0;
    return 1;
}

void vcuda_set_executor(Executor executor) {
    state().executor = executor;
}

// The `at_call`-th call of a driver function from now on answers `code`.
void vcuda_inject(const char* function, uint64_t at_call, int code) {
    std::lock_guard lock(state().state_mutex);
    state().injections[function] = {at_call, static_cast<CUresult>(code)};
}

// An executor says why it is about to return an error.
void vcuda_report(const char* text) {
    std::lock_guard lock(state().state_mutex);
    state().faults.emplace_back(text);
}

// Lines "name count". Returns the bytes that the whole text needs.
size_t vcuda_counters(char* out, size_t capacity) {
    std::lock_guard lock(state().state_mutex);
    std::string text;
    for (const auto& [name, value] : state().counters) text += name + " " + std::to_string(value) + "\n";
    return copy_text(text, out, capacity);
}

size_t vcuda_faults(char* out, size_t capacity) {
    std::lock_guard lock(state().state_mutex);
    std::string text;
    for (const std::string& line : state().faults) text += line + "\n";
    return copy_text(text, out, capacity);
}

void vcuda_clear_faults() {
    std::lock_guard lock(state().state_mutex);
    state().faults.clear();
}

size_t vcuda_ranges(uint64_t* out, size_t capacity) {
    return state().memory.ranges(out, capacity);
}
uint64_t vcuda_memory_version() {
    return state().memory.version();
}

size_t vcuda_explain(uint64_t address, uint64_t bytes, char* out, size_t capacity) {
    return copy_text(state().memory.check(address, bytes), out, capacity);
}

// What is still alive: device allocations, pinned allocations, modules, streams, events, executable graphs.
void vcuda_alive(uint64_t out[6]) {
    State& s = state();
    std::lock_guard lock(s.state_mutex);
    out[0] = s.memory.live_count(false);
    out[1] = s.memory.live_count(true);
    out[2] = s.modules.size();
    out[3] = s.streams.size();
    out[4] = s.events.size();
    out[5] = s.execs.size();
}

}  // extern "C"
