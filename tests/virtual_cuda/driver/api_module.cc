// Modules, functions and launches.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace vcuda {
namespace {

// Whether this device runs the image: cubins within a major (never an older minor, "a" code exactly), PTX
// upwards.
CUresult check_image(const Image& image) {
    const Config& config = state().config;
    const int here = config.compute_capability;
    const int code = image.compute_capability;
    const char* suffix = image.exact ? "a" : "";
    if (image.driver_needed > config.driver_version)
        return fault(
            image.ptx ? CUDA_ERROR_UNSUPPORTED_PTX_VERSION : CUDA_ERROR_INVALID_IMAGE,
            format("the image needs driver %d, this one is %d", image.driver_needed, config.driver_version));
    if (image.exact ? code != here : image.ptx ? code > here : code / 10 != here / 10 || code > here)
        return fault(image.ptx && !image.exact ? CUDA_ERROR_INVALID_PTX : CUDA_ERROR_NO_BINARY_FOR_GPU,
                     format("%s for sm_%d%s does not run on sm_%d", image.ptx ? "PTX" : "a cubin", code,
                            suffix, here));
    for (const KernelInfo& kernel : image.kernels)
        if (static_cast<int>(kernel.static_shared) > std::max(48 << 10, config.shared_optin))
            return fault(CUDA_ERROR_INVALID_PTX, kernel.name + ": too much static shared memory");
    return CUDA_SUCCESS;
}

void write_log(unsigned count, CUjit_option* options, void** values, const std::string& text) {
    char* buffer = nullptr;
    size_t size = 0;
    for (unsigned i = 0; i < count; ++i) {
        if (options[i] == CU_JIT_ERROR_LOG_BUFFER) buffer = static_cast<char*>(values[i]);
        if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) size = reinterpret_cast<size_t>(values[i]);
    }
    if (buffer != nullptr && size > 0) std::snprintf(buffer, size, "%s", text.c_str());
}

CUresult load(CUmodule* out, const void* data, unsigned count, CUjit_option* options, void** values) {
    auto module = std::make_unique<CUmod_st>();
    std::string why;
    CUresult code = parse_image(data, module->image, why);
    if (code != CUDA_SUCCESS) {
        fault(code, why);
    } else {
        code = check_image(module->image);
    }
    if (code != CUDA_SUCCESS) {
        std::lock_guard lock(state().state_mutex);
        write_log(count, options, values, state().faults.back());
        return code;
    }
    for (const KernelInfo& kernel : module->image.kernels) {
        auto function = std::make_unique<CUfunc_st>();
        function->module = module.get();
        function->info = kernel;
        function->max_dynamic_shared = std::max(0, (48 << 10) - static_cast<int>(kernel.static_shared));
        std::lock_guard lock(state().state_mutex);
        state().functions.insert(function.get());
        module->functions[kernel.name] = std::move(function);
    }
    std::lock_guard lock(state().state_mutex);
    state().modules.insert(module.get());
    *out = module.release();
    return CUDA_SUCCESS;
}

bool known(CUfunction function) {
    std::lock_guard lock(state().state_mutex);
    return state().functions.count(function) != 0;
}

CUresult check_shape(const KernelInfo& info, const uint32_t grid[3], const uint32_t block[3]) {
    const char* name = info.name.c_str();
    const uint64_t threads = uint64_t{block[0]} * block[1] * block[2];
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || threads == 0)
        return fault(CUDA_ERROR_INVALID_VALUE, format("%s: an empty grid or block", name));
    if (grid[0] > 0x7fffffffu || grid[1] > 65535 || grid[2] > 65535)
        return fault(CUDA_ERROR_INVALID_VALUE,
                     format("%s: grid %u,%u,%u is too large", name, grid[0], grid[1], grid[2]));
    if (threads > 1024 || block[2] > 64)
        return fault(CUDA_ERROR_INVALID_VALUE, format("%s: block of %lu threads", name, threads));
    if (info.required_block[0] != 0 &&
        std::memcmp(info.required_block, block, sizeof info.required_block) != 0)
        return fault(
            CUDA_ERROR_INVALID_VALUE,
            format("%s: block %u,%u,%u, but it was compiled for %u,%u,%u", name, block[0], block[1], block[2],
                   info.required_block[0], info.required_block[1], info.required_block[2]));
    if (threads > info.max_threads || info.registers * threads > 65536)
        return fault(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                     format("%s: %lu threads of %u registers", name, threads, info.registers));
    return CUDA_SUCCESS;
}

}  // namespace

CUresult make_kernel_work(CUfunction function, const uint32_t grid[3], const uint32_t block[3],
                          uint32_t shared_bytes, void** params, void** extra, KernelWork& out) {
    if (!known(function)) return fault(CUDA_ERROR_INVALID_HANDLE, "launch of an unknown function");
    const KernelInfo& info = function->info;
    const char* name = info.name.c_str();
    if (CUresult code = check_shape(info, grid, block); code != CUDA_SUCCESS) return code;
    if (static_cast<int>(shared_bytes) > function->max_dynamic_shared)
        return fault(
            CUDA_ERROR_INVALID_VALUE,
            format("%s: %u bytes of dynamic shared memory, allowed are %d (cuFuncSetAttribute opts in)", name,
                   shared_bytes, function->max_dynamic_shared));
    out.function = function;
    std::copy_n(grid, 3, out.grid.begin());
    std::copy_n(block, 3, out.block.begin());
    out.shared_bytes = shared_bytes;
    out.params.assign(info.param_bytes, 0);
    if (extra != nullptr) {
        const void* buffer = nullptr;
        size_t size = 0;
        for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
            if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = extra[1];
            if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) size = *static_cast<size_t*>(extra[1]);
        }
        if (buffer == nullptr || size != info.param_bytes)
            return fault(CUDA_ERROR_INVALID_VALUE, format("%s: %zu bytes of arguments, the image has %u",
                                                          name, size, info.param_bytes));
        std::memcpy(out.params.data(), buffer, size);
        return CUDA_SUCCESS;
    }
    for (size_t i = 0; i < info.param_sizes.size(); ++i) {
        if (params == nullptr || params[i] == nullptr)
            return fault(CUDA_ERROR_INVALID_VALUE,
                         format("%s: argument %zu of %zu is missing", name, i, info.param_sizes.size()));
        std::memcpy(out.params.data() + info.param_offsets[i], params[i], info.param_sizes[i]);
    }
    return CUDA_SUCCESS;
}

}  // namespace vcuda

using namespace vcuda;

extern "C" {

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    VCUDA_ENTER(cuModuleLoadData, kContext);
    return load(module, image, 0, nullptr, nullptr);
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int count, CUjit_option* options,
                            void** values) {
    VCUDA_ENTER(cuModuleLoadDataEx, kContext);
    return load(module, image, count, options, values);
}

CUresult cuModuleUnload(CUmodule module) {
    VCUDA_ENTER(cuModuleUnload, kContext);
    if (CUresult code = run_everything(); code != CUDA_SUCCESS) return code;
    std::lock_guard lock(state().state_mutex);
    if (state().modules.erase(module) == 0) return CUDA_ERROR_INVALID_HANDLE;
    for (const auto& [name, function] : module->functions) state().functions.erase(function.get());
    delete module;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    VCUDA_ENTER(cuModuleGetFunction, kContext);
    if (state().modules.count(module) == 0)
        return fault(CUDA_ERROR_INVALID_HANDLE, "cuModuleGetFunction: no such module");
    const auto found = module->functions.find(name);
    if (found == module->functions.end())
        return fault(CUDA_ERROR_NOT_FOUND, format("the module has no function %s", name));
    *function = found->second.get();
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
    VCUDA_ENTER(cuFuncGetAttribute, kContext);
    if (!known(function)) return fault(CUDA_ERROR_INVALID_HANDLE, "cuFuncGetAttribute: unknown function");
    const KernelInfo& info = function->info;
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            *value = static_cast<int>(info.max_threads);
            break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
            *value = static_cast<int>(info.static_shared);
            break;
        case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
        case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
            *value = 0;
            break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS:
            *value = static_cast<int>(info.registers);
            break;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
            *value = function->module->image.compute_capability;
            break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            *value = function->max_dynamic_shared;
            break;
        default:
            return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    VCUDA_ENTER(cuFuncSetAttribute, kContext);
    if (!known(function)) return fault(CUDA_ERROR_INVALID_HANDLE, "cuFuncSetAttribute: unknown function");
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    const int most = state().config.shared_optin - static_cast<int>(function->info.static_shared);
    if (value < 0 || value > most)
        return fault(CUDA_ERROR_INVALID_VALUE,
                     format("%s: opting in to %d bytes of dynamic shared memory, this device has %d",
                            function->info.name.c_str(), value, most));
    function->max_dynamic_shared = value;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* size) {
    VCUDA_ENTER(cuFuncGetParamInfo, kContext);
    if (!known(function) || index >= function->info.param_sizes.size()) return CUDA_ERROR_INVALID_VALUE;
    if (offset != nullptr) *offset = function->info.param_offsets[index];
    if (size != nullptr) *size = function->info.param_sizes[index];
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads,
                                                     size_t shared) {
    VCUDA_ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor, kContext);
    if (!known(function) || threads <= 0) return CUDA_ERROR_INVALID_VALUE;
    const KernelInfo& info = function->info;
    const auto per_block = static_cast<int>(shared + info.static_shared + 1024);
    const int by_registers =
        info.registers == 0 ? 32 : static_cast<int>(65536 / (info.registers * uint32_t(threads)));
    *blocks = std::min({32, 2048 / threads, (state().config.shared_optin + 1024) / per_block, by_registers});
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz,
                        unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared_bytes,
                        CUstream stream, void** params, void** extra) {
    VCUDA_ENTER(cuLaunchKernel, kContext);
    const uint32_t grid[3] = {gx, gy, gz};
    const uint32_t block[3] = {bx, by, bz};
    KernelWork work;
    if (CUresult code = make_kernel_work(function, grid, block, shared_bytes, params, extra, work);
        code != CUDA_SUCCESS)
        return code;
    return enqueue(stream, {std::move(work)});
}

// Attributes (programmatic dependent launch, priority) may only loosen the order, so ignoring them is valid.
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
    VCUDA_ENTER(cuLaunchKernelEx, kContext);
    const uint32_t grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    const uint32_t block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
    KernelWork work;
    if (CUresult code = make_kernel_work(function, grid, block, config->sharedMemBytes, params, extra, work);
        code != CUDA_SUCCESS)
        return code;
    return enqueue(config->hStream, {std::move(work)});
}

}  // extern "C"
