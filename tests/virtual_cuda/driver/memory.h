// Device memory on the host: allocations with guard pages, never at the same address twice.
//
// Host code cannot touch it outside of an AccessWindow: a runtime that follows a device pointer on the CPU
// crashes here as it does with a GPU. Freed memory stays unmapped for good.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace vcuda {

struct Allocation {
    uint64_t begin = 0;
    uint64_t size = 0;
    uint64_t serial = 0;
    bool live = true;
    bool pinned = false;  // host memory that the driver knows: device may access it, and so may the host
    bool ours = true;     // pinned and allocated by the driver (not merely registered)
};

class Memory {
public:
    static constexpr uint64_t kAlignment = 512;

    // 0 when `limit` bytes in all would be passed.
    uint64_t allocate(uint64_t size, uint64_t limit);
    [[nodiscard]] bool release(uint64_t begin);
    void* allocate_pinned(uint64_t size);
    void register_pinned(void* begin, uint64_t size);
    [[nodiscard]] bool release_pinned(const void* begin, bool ours);

    // The live allocation that holds the address, if any.
    [[nodiscard]] std::optional<Allocation> find(uint64_t address) const;
    [[nodiscard]] bool is_pinned(const void* begin, uint64_t size) const;
    // Whether the address is one that the device could have given out.
    [[nodiscard]] bool is_device(uint64_t address) const;
    // Empty if [address, address + size) lies in one live allocation; otherwise what is wrong with it.
    [[nodiscard]] std::string check(uint64_t address, uint64_t size) const;
    [[nodiscard]] uint64_t used() const;
    [[nodiscard]] uint64_t live_count(bool pinned) const;
    // Live ranges as begin, end pairs, ascending; returns how many pairs there are.
    size_t ranges(uint64_t* out, size_t capacity) const;
    // Grows when allocations come or go, so that readers can cache ranges().
    [[nodiscard]] uint64_t version() const;

    // While at least one window is open device memory is readable and writable.
    void open_window();
    void close_window();

private:
    void protect(const Allocation& allocation, bool accessible);
    [[nodiscard]] const Allocation* find_locked(uint64_t address) const;

    mutable std::recursive_mutex mutex_;
    std::map<uint64_t, Allocation> allocations_;  // by begin; freed ones stay, to explain use after free
    uint64_t base_ = 0;
    uint64_t next_ = 0;
    uint64_t used_ = 0;
    uint64_t serial_ = 0;
    uint64_t version_ = 0;
    int windows_ = 0;
};

class AccessWindow {
public:
    explicit AccessWindow(Memory& memory) : memory_(memory) { memory_.open_window(); }
    ~AccessWindow() { memory_.close_window(); }
    AccessWindow(const AccessWindow&) = delete;
    AccessWindow& operator=(const AccessWindow&) = delete;

private:
    Memory& memory_;
};

}  // namespace vcuda
