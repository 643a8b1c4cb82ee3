// Allocation and copies.
#include <cstring>

#include "state.h"

using namespace vcuda;

namespace {

// Calls that a real driver refuses in the thread of a capture in global mode.
CUresult refuse_in_capture(const char* name) {
    if (state().global_captures == 0) return CUDA_SUCCESS;
    return fault(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, format("%s while a stream is being captured", name));
}

bool capturing(CUstream stream) {
    std::lock_guard lock(state().state_mutex);
    CUstream resolved = resolve(stream);
    return resolved != nullptr && resolved->capture != nullptr;
}

CUresult copy(uint64_t to, uint64_t from, size_t bytes, CUstream stream, bool wait) {
    if (bytes == 0) return CUDA_SUCCESS;
    if (CUresult code = enqueue(stream, {CopyWork{to, from, bytes, nullptr}}); code != CUDA_SUCCESS)
        return code;
    return wait ? run_all(resolve(stream)) : CUDA_SUCCESS;
}

CUresult check_device(const char* name, uint64_t address, uint64_t bytes) {
    if (bytes == 0) return CUDA_SUCCESS;
    const std::string text = state().memory.check(address, bytes);
    return text.empty() ? CUDA_SUCCESS : fault(CUDA_ERROR_INVALID_VALUE, std::string(name) + ": " + text);
}

CUresult set(const char* name, CUdeviceptr to, uint32_t value, uint32_t width, size_t count, CUstream stream,
             bool wait) {
    if (CUresult code = check_device(name, to, count * width); code != CUDA_SUCCESS) return code;
    if (CUresult code = enqueue(stream, {SetWork{to, value, width, count}}); code != CUDA_SUCCESS)
        return code;
    return wait ? run_all(resolve(stream)) : CUDA_SUCCESS;
}

uint64_t host(const void* pointer) {
    return reinterpret_cast<uint64_t>(pointer);
}

}  // namespace

#define VCUDA_CHECK(call) \
    if (CUresult checked_ = (call); checked_ != CUDA_SUCCESS) return checked_

extern "C" {

CUresult cuMemGetInfo(size_t* free, size_t* total) {
    VCUDA_ENTER(cuMemGetInfo, kContext);
    *total = state().config.memory;
    *free = state().config.memory - state().memory.used();
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    VCUDA_ENTER(cuMemAlloc, kContext);
    if (bytes == 0) return fault(CUDA_ERROR_INVALID_VALUE, "cuMemAlloc of 0 bytes");
    VCUDA_CHECK(refuse_in_capture("cuMemAlloc"));
    *address = state().memory.allocate(bytes, state().config.memory);
    if (*address != 0) return CUDA_SUCCESS;
    return fault(CUDA_ERROR_OUT_OF_MEMORY, format("cuMemAlloc of %zu bytes: %lu of %lu bytes are in use",
                                                  bytes, state().memory.used(), state().config.memory));
}

CUresult cuMemFree(CUdeviceptr address) {
    VCUDA_ENTER(cuMemFree, kContext);
    if (address == 0) return CUDA_SUCCESS;
    VCUDA_CHECK(refuse_in_capture("cuMemFree"));
    VCUDA_CHECK(run_everything());  // cuMemFree waits for the device
    if (state().memory.release(address)) return CUDA_SUCCESS;
    return fault(CUDA_ERROR_INVALID_VALUE,
                 format("cuMemFree(0x%llx): not the start of a live allocation", address));
}

CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream stream) {
    VCUDA_ENTER(cuMemAllocAsync, kContext);
    if (capturing(stream))
        return fault(CUDA_ERROR_NOT_SUPPORTED, "cuMemAllocAsync in a capture is not virtualised");
    *address = state().memory.allocate(bytes, state().config.memory);
    return *address != 0 ? CUDA_SUCCESS
                         : fault(CUDA_ERROR_OUT_OF_MEMORY, format("cuMemAllocAsync of %zu bytes", bytes));
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    VCUDA_ENTER(cuMemFreeAsync, kContext);
    VCUDA_CHECK(check_device("cuMemFreeAsync", address, 1));
    return enqueue(stream, {FreeWork{address}});
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
    VCUDA_ENTER(cuMemGetAddressRange, kContext);
    const auto found = state().memory.find(address);
    if (!found) return CUDA_ERROR_NOT_FOUND;
    if (base != nullptr) *base = found->begin;
    if (size != nullptr) *size = found->size;
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned int) {
    VCUDA_ENTER(cuMemHostAlloc, kContext);
    VCUDA_CHECK(refuse_in_capture("cuMemHostAlloc"));
    *memory = state().memory.allocate_pinned(bytes);
    return *memory != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAllocHost(void** memory, size_t bytes) {
    VCUDA_ENTER(cuMemAllocHost, kContext);
    VCUDA_CHECK(refuse_in_capture("cuMemAllocHost"));
    *memory = state().memory.allocate_pinned(bytes);
    return *memory != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void* memory) {
    VCUDA_ENTER(cuMemFreeHost, kContext);
    VCUDA_CHECK(run_everything());
    if (state().memory.release_pinned(memory, true)) return CUDA_SUCCESS;
    return fault(CUDA_ERROR_INVALID_VALUE, "cuMemFreeHost: not memory of cuMemHostAlloc");
}

CUresult cuMemHostRegister(void* memory, size_t bytes, unsigned int) {
    VCUDA_ENTER(cuMemHostRegister, kContext);
    state().memory.register_pinned(memory, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* memory) {
    VCUDA_ENTER(cuMemHostUnregister, kContext);
    VCUDA_CHECK(run_everything());
    return state().memory.release_pinned(memory, false) ? CUDA_SUCCESS
                                                        : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* memory, unsigned int) {
    VCUDA_ENTER(cuMemHostGetDevicePointer, kContext);
    if (!state().memory.is_pinned(memory, 1)) return CUDA_ERROR_INVALID_VALUE;
    *address = host(memory);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    VCUDA_ENTER(cuMemcpyHtoDAsync, kContext);
    VCUDA_CHECK(check_device("cuMemcpyHtoDAsync", to, bytes));
    if (state().memory.is_pinned(from, bytes)) return copy(to, host(from), bytes, stream, false);
    if (capturing(stream))
        return fault(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "copy from pageable memory in a stream capture");
    // A real driver stages pageable memory before it returns.
    const auto* source = static_cast<const uint8_t*>(from);
    CopyWork work{to, 0, bytes, std::make_shared<std::vector<uint8_t>>(source, source + bytes)};
    return enqueue(stream, {std::move(work)});
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    VCUDA_ENTER(cuMemcpyDtoHAsync, kContext);
    VCUDA_CHECK(check_device("cuMemcpyDtoHAsync", from, bytes));
    const bool pinned = state().memory.is_pinned(to, bytes);
    if (!pinned && capturing(stream))
        return fault(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "copy to pageable memory in a stream capture");
    if (!pinned) count("pageable_waits");  // the call blocks until the copy is done
    return copy(host(to), from, bytes, stream, !pinned);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    VCUDA_ENTER(cuMemcpyDtoDAsync, kContext);
    VCUDA_CHECK(check_device("cuMemcpyDtoDAsync", to, bytes));
    VCUDA_CHECK(check_device("cuMemcpyDtoDAsync", from, bytes));
    return copy(to, from, bytes, stream, false);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    VCUDA_ENTER(cuMemcpyAsync, kContext);
    return copy(to, from, bytes, stream, false);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
    VCUDA_ENTER(cuMemcpyHtoD, kContext);
    VCUDA_CHECK(check_device("cuMemcpyHtoD", to, bytes));
    return copy(to, host(from), bytes, nullptr, true);
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
    VCUDA_ENTER(cuMemcpyDtoH, kContext);
    VCUDA_CHECK(check_device("cuMemcpyDtoH", from, bytes));
    return copy(host(to), from, bytes, nullptr, true);
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    VCUDA_ENTER(cuMemcpyDtoD, kContext);
    VCUDA_CHECK(check_device("cuMemcpyDtoD", to, bytes));
    VCUDA_CHECK(check_device("cuMemcpyDtoD", from, bytes));
    return copy(to, from, bytes, nullptr, false);
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    VCUDA_ENTER(cuMemcpy, kContext);
    return copy(to, from, bytes, nullptr, true);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    VCUDA_ENTER(cuMemsetD8Async, kContext);
    return set("cuMemsetD8Async", to, value, 1, count, stream, false);
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
    VCUDA_ENTER(cuMemsetD16Async, kContext);
    return set("cuMemsetD16Async", to, value, 2, count, stream, false);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
    VCUDA_ENTER(cuMemsetD32Async, kContext);
    return set("cuMemsetD32Async", to, value, 4, count, stream, false);
}

CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
    VCUDA_ENTER(cuMemsetD8, kContext);
    return set("cuMemsetD8", to, value, 1, count, nullptr, true);
}

CUresult cuMemsetD16(CUdeviceptr to, unsigned short value, size_t count) {
    VCUDA_ENTER(cuMemsetD16, kContext);
    return set("cuMemsetD16", to, value, 2, count, nullptr, true);
}

CUresult cuMemsetD32(CUdeviceptr to, unsigned int value, size_t count) {
    VCUDA_ENTER(cuMemsetD32, kContext);
    return set("cuMemsetD32", to, value, 4, count, nullptr, true);
}

}  // extern "C"
