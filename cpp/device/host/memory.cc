#include "device/host/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <limits>
#include <new>

namespace castiron::host {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

HugeBuffer::HugeBuffer(size_t bytes, bool huge_pages) : bytes_(bytes) {
    if (bytes == 0) return;
    if (bytes > std::numeric_limits<size_t>::max() / 2) throw std::bad_alloc();
    // Small buffers are not worth a 2 MiB page each.
    const bool huge = huge_pages && bytes >= kHugePage;
    const size_t align = huge ? kHugePage : 4096;
    const size_t rounded = (bytes + align - 1) / align * align;
    map_bytes_ = rounded + (huge ? kHugePage : 0);
    map_ =
        mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map_ == MAP_FAILED) {
        map_ = nullptr;
        throw std::bad_alloc();
    }
    const auto start = (reinterpret_cast<uintptr_t>(map_) + align - 1) / align * align;
    data_ = reinterpret_cast<std::byte*>(start);
    // Advice only: where transparent huge pages are off the buffer works all the same.
    if (huge) (void)madvise(data_, rounded, MADV_HUGEPAGE);
}

HugeBuffer::~HugeBuffer() {
    if (map_ != nullptr) munmap(map_, map_bytes_);
}

}  // namespace castiron::host
