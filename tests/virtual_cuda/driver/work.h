// What streams queue and graphs hold: plain data, with argument values copied when the call was made.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

namespace vcuda {

struct KernelWork {
    CUfunction function = nullptr;
    std::array<uint32_t, 3> grid{1, 1, 1};
    std::array<uint32_t, 3> block{1, 1, 1};
    uint32_t shared_bytes = 0;
    std::vector<uint8_t> params;  // laid out as in the image
};

struct CopyWork {
    uint64_t to = 0;
    uint64_t from = 0;
    uint64_t bytes = 0;
    std::shared_ptr<std::vector<uint8_t>> staged;  // a pageable source, read when the call was made
};

struct SetWork {
    uint64_t to = 0;
    uint32_t value = 0;
    uint32_t width = 1;  // bytes of an element
    uint64_t count = 0;
};

struct HostWork {
    CUhostFn function = nullptr;
    void* user_data = nullptr;
};

struct RecordWork {
    CUevent event = nullptr;
};

// Wait until `stream` has finished `position` works. Positions always lie in the past of the call.
struct WaitWork {
    CUstream stream = nullptr;
    uint64_t position = 0;
};

struct FreeWork {
    uint64_t address = 0;
};

struct EmptyWork {};

struct Work;
struct GraphWork {
    std::shared_ptr<const std::vector<Work>> works;
};

struct Work {
    std::variant<EmptyWork, KernelWork, CopyWork, SetWork, HostWork, RecordWork, WaitWork, FreeWork,
                 GraphWork>
        what;
};

// Put work at the end of a stream, or into the graph that is being captured there.
CUresult enqueue(CUstream stream, Work work);
// Execute what the stream holds up to `position`, and first whatever that waits for.
CUresult run_until(CUstream stream, uint64_t position);
CUresult run_all(CUstream stream);
CUresult run_everything();

// Check a launch against its image and the device's limits, and pack its arguments.
CUresult make_kernel_work(CUfunction function, const uint32_t grid[3], const uint32_t block[3],
                          uint32_t shared_bytes, void** params, void** extra, KernelWork& out);
// The stream behind a handle (0, legacy and per-thread handles included), or null for a stale one.
CUstream resolve(CUstream handle);

}  // namespace vcuda
