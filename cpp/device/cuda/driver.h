// The CUDA driver API as far as the device uses it, declared from NVIDIA's documentation and found at run
// time: a machine without a driver loads castiron all the same, and no CUDA header or library is needed to
// build it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace castiron::cuda {

using DeviceHandle = int;
using Address = unsigned long long;  // CUdeviceptr
using Context = struct CUctx_st*;
using ModuleHandle = struct CUmod_st*;
using Function = struct CUfunc_st*;
using StreamHandle = struct CUstream_st*;
using EventHandle = struct CUevent_st*;
using GraphHandle = struct CUgraph_st*;
using GraphExecHandle = struct CUgraphExec_st*;

// CUresult, as far as a value decides what is said or done.
enum class Result : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNoDevice = 100,
    kInvalidImage = 200,
    kNoBinaryForGpu = 209,
    kEccUncorrectable = 214,
    kInvalidPtx = 218,
    kNvlinkUncorrectable = 220,
    kUnsupportedPtxVersion = 222,
    kNotFound = 500,
    kIllegalAddress = 700,
    kLaunchTimeout = 702,
    kContextIsDestroyed = 709,
    kAssert = 710,
    kHardwareStackError = 714,
    kIllegalInstruction = 715,
    kMisalignedAddress = 716,
    kInvalidAddressSpace = 717,
    kInvalidPc = 718,
    kLaunchFailed = 719,
};

enum class Attribute : int {  // CUdevice_attribute
    kMultiprocessors = 16,
    kMajor = 75,
    kMinor = 76,
    kMaxSharedOptin = 97,
};

enum class FunctionAttribute : int { kMaxDynamicShared = 8 };
enum class CaptureMode : int { kThreadLocal = 1 };
enum class JitOption : int { kErrorLog = 5, kErrorLogBytes = 6 };
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;

// X(name of the member, exported name, parameters). Result is the return type of all.
#define CASTIRON_CUDA_FUNCTIONS(X)                                                                           \
    X(init, "cuInit", (unsigned flags))                                                                      \
    X(driver_version, "cuDriverGetVersion", (int* version))                                                  \
    X(error_name, "cuGetErrorName", (Result error, const char** name))                                       \
    X(error_string, "cuGetErrorString", (Result error, const char** text))                                   \
    X(device_count, "cuDeviceGetCount", (int* count))                                                        \
    X(device_get, "cuDeviceGet", (DeviceHandle * device, int ordinal))                                       \
    X(device_name, "cuDeviceGetName", (char* name, int length, DeviceHandle device))                         \
    X(device_memory, "cuDeviceTotalMem_v2", (size_t* bytes, DeviceHandle device))                            \
    X(device_attribute, "cuDeviceGetAttribute", (int* value, Attribute attribute, DeviceHandle device))      \
    X(context_retain, "cuDevicePrimaryCtxRetain", (Context * context, DeviceHandle device))                  \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (DeviceHandle device))                                \
    X(context_set_current, "cuCtxSetCurrent", (Context context))                                             \
    X(memory_info, "cuMemGetInfo_v2", (size_t* free, size_t* total))                                         \
    X(memory_alloc, "cuMemAlloc_v2", (Address * address, size_t bytes))                                      \
    X(memory_free, "cuMemFree_v2", (Address address))                                                        \
    X(host_alloc, "cuMemHostAlloc", (void** data, size_t bytes, unsigned flags))                             \
    X(host_free, "cuMemFreeHost", (void* data))                                                              \
    X(copy_to_device, "cuMemcpyHtoDAsync_v2",                                                                \
      (Address to, const void* from, size_t bytes, StreamHandle stream))                                     \
    X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void* to, Address from, size_t bytes, StreamHandle stream))     \
    X(copy_on_device, "cuMemcpyDtoDAsync_v2", (Address to, Address from, size_t bytes, StreamHandle stream)) \
    X(stream_create, "cuStreamCreate", (StreamHandle * stream, unsigned flags))                              \
    X(stream_destroy, "cuStreamDestroy_v2", (StreamHandle stream))                                           \
    X(stream_synchronize, "cuStreamSynchronize", (StreamHandle stream))                                      \
    X(event_create, "cuEventCreate", (EventHandle * event, unsigned flags))                                  \
    X(event_destroy, "cuEventDestroy_v2", (EventHandle event))                                               \
    X(event_record, "cuEventRecord", (EventHandle event, StreamHandle stream))                               \
    X(event_synchronize, "cuEventSynchronize", (EventHandle event))                                          \
    X(module_load, "cuModuleLoadDataEx",                                                                     \
      (ModuleHandle * module, const void* image, unsigned num_options, JitOption* options, void** values))   \
    X(module_unload, "cuModuleUnload", (ModuleHandle module))                                                \
    X(module_function, "cuModuleGetFunction", (Function * function, ModuleHandle module, const char* name))  \
    X(function_set, "cuFuncSetAttribute", (Function function, FunctionAttribute attribute, int value))       \
    X(launch, "cuLaunchKernel",                                                                              \
      (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,               \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, StreamHandle stream, void** params,        \
       void** extra))                                                                                        \
    X(capture_begin, "cuStreamBeginCapture_v2", (StreamHandle stream, CaptureMode mode))                     \
    X(capture_end, "cuStreamEndCapture", (StreamHandle stream, GraphHandle * graph))                         \
    X(graph_instantiate, "cuGraphInstantiateWithFlags",                                                      \
      (GraphExecHandle * exec, GraphHandle graph, unsigned long long flags))                                 \
    X(graph_upload, "cuGraphUpload", (GraphExecHandle exec, StreamHandle stream))                            \
    X(graph_launch, "cuGraphLaunch", (GraphExecHandle exec, StreamHandle stream))                            \
    X(graph_destroy, "cuGraphDestroy", (GraphHandle graph))                                                  \
    X(graph_exec_destroy, "cuGraphExecDestroy", (GraphExecHandle exec))

// The functions. Tests fill one with functions of their own.
struct Driver {
#define CASTIRON_DECLARE(member, symbol, params) Result(*member) params = nullptr;
    CASTIRON_CUDA_FUNCTIONS(CASTIRON_DECLARE)
#undef CASTIRON_DECLARE
    // Absent before CUDA 12.4. Loads a function's code at once, so that graph capture never has to.
    Result (*function_load)(Function function) = nullptr;
};

// A driver call that failed.
class CudaError : public std::runtime_error {
public:
    CudaError(Result result, const std::string& message) : std::runtime_error(message), result_(result) {}
    [[nodiscard]] Result result() const { return result_; }

private:
    Result result_;
};

// The driver of this machine, initialised; loaded once. Throws std::runtime_error that says why there is
// none.
[[nodiscard]] const Driver& load_driver();

// "an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS, 700)".
[[nodiscard]] std::string error_text(const Driver& driver, Result result);

// Whether the context is beyond use after this error: every later call would return it again.
[[nodiscard]] bool is_sticky(Result result);

// Throws when a call failed: DeviceLostError for a sticky error, CudaError for others. `doing` completes "the
// CUDA driver failed while ...".
void check(const Driver& driver, Result result, const char* doing);

// "13.0" of 13000.
[[nodiscard]] std::string version_text(int version);

}  // namespace castiron::cuda
