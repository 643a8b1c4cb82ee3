#include "state.h"

namespace vcuda {

State& state() {
    // Never destroyed: threads of the runtime may still call while the process ends.
    static State* instance = new State;
    return *instance;
}

namespace {

thread_local std::vector<CUcontext> t_contexts;

bool is_sticky(CUresult code) {
    switch (code) {
        case CUDA_ERROR_ILLEGAL_ADDRESS:
        case CUDA_ERROR_LAUNCH_FAILED:
        case CUDA_ERROR_LAUNCH_TIMEOUT:
        case CUDA_ERROR_MISALIGNED_ADDRESS:
        case CUDA_ERROR_ILLEGAL_INSTRUCTION:
        case CUDA_ERROR_HARDWARE_STACK_ERROR:
        case CUDA_ERROR_ECC_UNCORRECTABLE:
        case CUDA_ERROR_DEVICE_UNAVAILABLE:
        case CUDA_ERROR_UNKNOWN:
            return true;
        default:
            return false;
    }
}

}  // namespace

std::vector<CUcontext>& context_stack() {
    return t_contexts;
}

CUcontext current_context() {
    return t_contexts.empty() ? nullptr : t_contexts.back();
}

CUresult enter(const char* name, Needs needs) {
    State& s = state();
    {
        std::lock_guard lock(s.state_mutex);
        ++s.counters[name];
        if (auto found = s.injections.find(name);
            found != s.injections.end() && --found->second.at_call == 0) {
            const CUresult code = found->second.code;
            s.injections.erase(found);
            s.faults.push_back(format("%s: injected %s", name, error_name(code).c_str()));
            if (is_sticky(code)) s.sticky = code;
            return code;
        }
        if (needs == Needs::kNothing) return CUDA_SUCCESS;
        if (s.initialized && (needs == Needs::kInit || current_context() != nullptr)) return s.sticky;
    }
    if (!s.initialized) return fault(CUDA_ERROR_NOT_INITIALIZED, format("%s before cuInit", name));
    return fault(CUDA_ERROR_INVALID_CONTEXT, format("%s: this thread has no current context", name));
}

CUresult fault(CUresult code, const std::string& text) {
    std::lock_guard lock(state().state_mutex);
    state().faults.push_back(error_name(code) + ": " + text);
    return code;
}

CUresult lose(CUresult code, const std::string& text) {
    fault(code, text);
    std::lock_guard lock(state().state_mutex);
    if (state().sticky == CUDA_SUCCESS) state().sticky = code;
    return code;
}

void count(const std::string& name, uint64_t amount) {
    std::lock_guard lock(state().state_mutex);
    state().counters[name] += amount;
}

std::string error_name(CUresult code) {
    const char* name = nullptr;
    cuGetErrorName(code, &name);
    return name == nullptr ? format("CUresult %d", static_cast<int>(code)) : name;
}

}  // namespace vcuda
