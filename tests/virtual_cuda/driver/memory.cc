#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace vcuda {
namespace {

constexpr uint64_t kReserved = 1ull << 40;  // address space, not memory
constexpr uint64_t kPage = 4096;

uint64_t g_base = 0;
struct sigaction g_previous;

uint64_t pages(uint64_t size) {
    return (size + kPage - 1) / kPage * kPage;
}

// Says what happened before the process dies as it would with a real device pointer.
void on_segv(int signal, siginfo_t* info, void* context) {
    const auto address = reinterpret_cast<uint64_t>(info->si_addr);
    if (address >= g_base && address < g_base + kReserved) {
        char text[200];
        const int n =
            std::snprintf(text, sizeof text,
                          "virtual CUDA device: host code touched device memory at 0x%lx outside of a "
                          "driver call, or a kernel left its allocation\n",
                          address);
        if (write(2, text, static_cast<size_t>(n)) < 0) _exit(139);
    }
    if (g_previous.sa_flags & SA_SIGINFO) {
        g_previous.sa_sigaction(signal, info, context);
    } else if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
        g_previous.sa_handler(signal);
    } else {
        sigaction(SIGSEGV, &g_previous, nullptr);  // returning faults again, now with the default action
    }
}

uint64_t reserve_addresses() {
    void* base = mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        std::perror("virtual CUDA device: cannot reserve address space");
        std::abort();
    }
    g_base = reinterpret_cast<uint64_t>(base);
    struct sigaction action = {};
    action.sa_sigaction = on_segv;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &g_previous);
    return g_base;
}

}  // namespace

uint64_t Memory::allocate(uint64_t size, uint64_t limit) {
    std::lock_guard lock(mutex_);
    if (base_ == 0) next_ = base_ = reserve_addresses();
    const uint64_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    if (rounded < size || used_ + rounded > limit || next_ + pages(rounded) + 2 * kPage > base_ + kReserved)
        return 0;
    // The end lies at a page that is never mapped: compiled kernels that run past it are caught by the
    // processor.
    const uint64_t end = next_ + kPage + pages(rounded);
    Allocation allocation{.begin = end - rounded, .size = size, .serial = ++serial_};
    next_ = end;
    protect(allocation, true);
    std::memset(reinterpret_cast<void*>(allocation.begin), 0xFF, rounded);  // NaN in every float type
    if (windows_ == 0) protect(allocation, false);
    allocations_[allocation.begin] = allocation;
    used_ += rounded;
    ++version_;
    return allocation.begin;
}

bool Memory::release(uint64_t begin) {
    std::lock_guard lock(mutex_);
    auto found = allocations_.find(begin);
    if (found == allocations_.end() || !found->second.live || found->second.pinned) return false;
    Allocation& allocation = found->second;
    protect(allocation, false);
    madvise(reinterpret_cast<void*>(allocation.begin / kPage * kPage), pages(allocation.size + kPage),
            MADV_DONTNEED);
    allocation.live = false;
    used_ -= (allocation.size + kAlignment - 1) / kAlignment * kAlignment;
    ++version_;
    return true;
}

void* Memory::allocate_pinned(uint64_t size) {
    std::lock_guard lock(mutex_);
    void* memory = std::aligned_alloc(kPage, pages(size == 0 ? 1 : size));
    if (memory == nullptr) return nullptr;
    std::memset(memory, 0xFF, size);
    register_pinned(memory, size);
    allocations_[reinterpret_cast<uint64_t>(memory)].ours = true;
    return memory;
}

void Memory::register_pinned(void* begin, uint64_t size) {
    std::lock_guard lock(mutex_);
    const auto address = reinterpret_cast<uint64_t>(begin);
    allocations_[address] = {
        .begin = address, .size = size, .serial = ++serial_, .pinned = true, .ours = false};
    ++version_;
}

bool Memory::release_pinned(const void* begin, bool ours) {
    std::lock_guard lock(mutex_);
    auto found = allocations_.find(reinterpret_cast<uint64_t>(begin));
    if (found == allocations_.end() || !found->second.pinned || found->second.ours != ours) return false;
    allocations_.erase(found);
    if (ours) std::free(const_cast<void*>(begin));
    ++version_;
    return true;
}

const Allocation* Memory::find_locked(uint64_t address) const {
    auto next = allocations_.upper_bound(address);
    if (next == allocations_.begin()) return nullptr;
    return &std::prev(next)->second;
}

std::optional<Allocation> Memory::find(uint64_t address) const {
    std::lock_guard lock(mutex_);
    const Allocation* found = find_locked(address);
    if (found == nullptr || !found->live || address >= found->begin + found->size) return std::nullopt;
    return *found;
}

bool Memory::is_pinned(const void* begin, uint64_t size) const {
    std::lock_guard lock(mutex_);
    const auto address = reinterpret_cast<uint64_t>(begin);
    const Allocation* found = find_locked(address);
    return found != nullptr && found->pinned && address + size <= found->begin + found->size;
}

bool Memory::is_device(uint64_t address) const {
    return base_ != 0 && address >= base_ && address < base_ + kReserved;
}

std::string Memory::check(uint64_t address, uint64_t size) const {
    std::lock_guard lock(mutex_);
    const Allocation* found = find_locked(address);
    char text[256];
    if (found == nullptr || (!is_device(address) && address >= found->begin + found->size)) {
        std::snprintf(text, sizeof text, "0x%lx is no device address", address);
        return text;
    }
    const uint64_t offset = address - found->begin;
    const char* kind = found->pinned ? "pinned" : "device";
    if (!found->live) {
        std::snprintf(text, sizeof text, "0x%lx: byte %lu of %s allocation %lu (%lu bytes), which was freed",
                      address, offset, kind, found->serial, found->size);
        return text;
    }
    if (offset + size <= found->size) return {};
    std::snprintf(text, sizeof text, "0x%lx: bytes %lu to %lu of %s allocation %lu, which has %lu bytes",
                  address, offset, offset + size, kind, found->serial, found->size);
    return text;
}

uint64_t Memory::used() const {
    std::lock_guard lock(mutex_);
    return used_;
}

uint64_t Memory::live_count(bool pinned) const {
    std::lock_guard lock(mutex_);
    uint64_t live = 0;
    for (const auto& [begin, allocation] : allocations_)
        live += allocation.live && allocation.pinned == pinned;
    return live;
}

size_t Memory::ranges(uint64_t* out, size_t capacity) const {
    std::lock_guard lock(mutex_);
    size_t pairs = 0;
    for (const auto& [begin, allocation] : allocations_) {
        if (!allocation.live) continue;
        if (pairs < capacity) {
            out[2 * pairs] = begin;
            out[2 * pairs + 1] = begin + allocation.size;
        }
        ++pairs;
    }
    return pairs;
}

uint64_t Memory::version() const {
    std::lock_guard lock(mutex_);
    return version_;
}

void Memory::protect(const Allocation& allocation, bool accessible) {
    const uint64_t first = allocation.begin / kPage * kPage;
    const uint64_t rounded = (allocation.size + kAlignment - 1) / kAlignment * kAlignment;
    const int mode = accessible ? PROT_READ | PROT_WRITE : PROT_NONE;
    mprotect(reinterpret_cast<void*>(first), allocation.begin + rounded - first, mode);
}

void Memory::open_window() {
    std::lock_guard lock(mutex_);
    if (windows_++ > 0) return;
    for (const auto& [begin, allocation] : allocations_)
        if (allocation.live && !allocation.pinned) protect(allocation, true);
}

void Memory::close_window() {
    std::lock_guard lock(mutex_);
    if (--windows_ > 0) return;
    for (const auto& [begin, allocation] : allocations_)
        if (allocation.live && !allocation.pinned) protect(allocation, false);
}

}  // namespace vcuda
