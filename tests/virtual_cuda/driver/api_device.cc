// Initialisation, device attributes and contexts.
#include <dlfcn.h>

#include <cstring>

#include "state.h"

namespace vcuda {
std::vector<CUcontext>& context_stack();

namespace {

int threads_per_multiprocessor(int cc) {
    return cc == 86 || cc == 89 || cc == 120 ? 1536 : 2048;
}

struct ErrorText {
    CUresult code;
    const char* name;
    const char* text;
};

constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not initiated in this stream"},
    {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "capturing stream has unjoined work"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
     "the graph update was not performed because it included changes which violated constraints"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

}  // namespace
}  // namespace vcuda

using namespace vcuda;

extern "C" {

CUresult cuGetErrorName(CUresult error, const char** name) {
    for (const ErrorText& known : kErrors)
        if (known.code == error) return *name = known.name, CUDA_SUCCESS;
    *name = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
    for (const ErrorText& known : kErrors)
        if (known.code == error) return *text = known.text, CUDA_SUCCESS;
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuInit(unsigned int flags) {
    VCUDA_ENTER(cuInit, kNothing);
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (state().config.devices == 0) return fault(CUDA_ERROR_NO_DEVICE, "cuInit: no device is configured");
    state().initialized = true;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
    VCUDA_ENTER(cuDriverGetVersion, kNothing);
    *version = state().config.driver_version;
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char* symbol, void** function, int, cuuint64_t,
                          CUdriverProcAddressQueryResult* found) {
    VCUDA_ENTER(cuGetProcAddress, kNothing);
    *function = nullptr;
    for (const char* suffix : {"_v4", "_v3", "_v2", "WithFlags", ""}) {
        *function = dlsym(RTLD_DEFAULT, (std::string(symbol) + suffix).c_str());
        if (*function != nullptr) break;
    }
    if (found != nullptr)
        *found = *function != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function != nullptr ? CUDA_SUCCESS
                                : fault(CUDA_ERROR_NOT_FOUND, format("cuGetProcAddress(%s)", symbol));
}

CUresult cuDeviceGetCount(int* count) {
    VCUDA_ENTER(cuDeviceGetCount, kInit);
    *count = state().config.devices;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    VCUDA_ENTER(cuDeviceGet, kInit);
    if (ordinal < 0 || ordinal >= state().config.devices) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice) {
    VCUDA_ENTER(cuDeviceGetName, kInit);
    std::snprintf(name, static_cast<size_t>(length), "Virtual CUDA device sm_%d",
                  state().config.compute_capability);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    VCUDA_ENTER(cuDeviceGetUuid, kInit);
    std::memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = static_cast<char>(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
    VCUDA_ENTER(cuDeviceTotalMem, kInit);
    *bytes = state().config.memory;
    return CUDA_SUCCESS;
}

// Figures: CUDA C++ programming guide, "Technical specifications per compute capability".
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    VCUDA_ENTER(cuDeviceGetAttribute, kInit);
    const Config& config = state().config;
    const int cc = config.compute_capability;
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
            *value = cc / 10;
            break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
            *value = cc % 10;
            break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
            *value = config.multiprocessors;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
            *value = 48 << 10;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
            *value = config.shared_optin;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
            *value = config.shared_optin + 1024;
            break;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
            *value = 1024;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            *value = 1024;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
            *value = threads_per_multiprocessor(cc);
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
            *value = 32;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
            *value = 65536;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
            *value = 65536;
            break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
            *value = 32;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
            *value = 1024;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
            *value = 64;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
            *value = 0x7fffffff;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
            *value = 65535;
            break;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
            *value = 50 << 20;
            break;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
            *value = 1980000;
            break;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
            *value = 2619000;
            break;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
            *value = 5120;
            break;
        case CU_DEVICE_ATTRIBUTE_INTEGRATED:
            *value = config.integrated;
            break;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
            *value = 1;
            break;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
            *value = 3;
            break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
            *value = 0;
            break;
        default:
            return fault(
                CUDA_ERROR_INVALID_VALUE,
                format("device attribute %d is unknown to the virtual device", static_cast<int>(attribute)));
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    VCUDA_ENTER(cuDevicePrimaryCtxRetain, kInit);
    ++state().primary_references;
    *context = &state().primary;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) {
    VCUDA_ENTER(cuDevicePrimaryCtxRelease, kInit);
    if (state().primary_references == 0)
        return fault(CUDA_ERROR_INVALID_CONTEXT, "primary context released more often than retained");
    --state().primary_references;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice, unsigned int) {
    VCUDA_ENTER(cuDevicePrimaryCtxSetFlags, kInit);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned int* flags, int* active) {
    VCUDA_ENTER(cuDevicePrimaryCtxGetState, kInit);
    *flags = 0;
    *active = state().primary_references > 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    VCUDA_ENTER(cuCtxSetCurrent, kInit);
    auto& stack = context_stack();
    if (!stack.empty()) stack.pop_back();
    if (context == nullptr) return CUDA_SUCCESS;
    if (context != &state().primary || state().primary_references == 0)
        return fault(CUDA_ERROR_INVALID_CONTEXT, "cuCtxSetCurrent: not a live context");
    stack.push_back(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    VCUDA_ENTER(cuCtxGetCurrent, kInit);
    *context = current_context();
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    VCUDA_ENTER(cuCtxPushCurrent, kInit);
    if (context != &state().primary || state().primary_references == 0)
        return fault(CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent: not a live context");
    context_stack().push_back(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
    VCUDA_ENTER(cuCtxPopCurrent, kInit);
    auto& stack = context_stack();
    if (stack.empty()) return fault(CUDA_ERROR_INVALID_CONTEXT, "cuCtxPopCurrent: nothing to pop");
    if (context != nullptr) *context = stack.back();
    stack.pop_back();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
    VCUDA_ENTER(cuCtxGetDevice, kContext);
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
    VCUDA_ENTER(cuCtxSynchronize, kContext);
    if (state().global_captures > 0)
        return fault(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                     "cuCtxSynchronize while a stream is being captured");
    return run_everything();
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    VCUDA_ENTER(cuCtxGetStreamPriorityRange, kContext);
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

}  // extern "C"
