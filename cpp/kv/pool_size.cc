#include "kv/pool_size.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <stdexcept>

#include "kv/block_table.h"

namespace castiron {
namespace {

// A file that holds one number; nothing when it is absent or says "max".
std::optional<uint64_t> read_number(const std::string& path) {
    std::ifstream file(path);
    uint64_t number = 0;
    if (file >> number) return number;
    return std::nullopt;
}

std::optional<uint64_t> meminfo_available() {
    std::ifstream file("/proc/meminfo");
    std::string key;
    uint64_t kib = 0;
    std::string unit;
    while (file >> key >> kib) {
        std::getline(file, unit);
        if (key == "MemAvailable:") return kib * 1024;
    }
    return std::nullopt;
}

}  // namespace

uint64_t available_memory() {
    uint64_t available = meminfo_available().value_or(uint64_t{1} << 30);
    const std::pair<const char*, const char*> groups[] = {
        {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}};
    for (const auto& [limit_path, usage_path] : groups) {
        const auto limit = read_number(limit_path);
        const auto usage = read_number(usage_path);
        if (limit && usage) available = std::min(available, *limit > *usage ? *limit - *usage : 0);
    }
    return available;
}

PoolSize choose_pool_size(int requested, const Limits& limits, uint64_t block_bytes, uint64_t available,
                          uint64_t by_default) {
    if (requested > 0) {
        const uint64_t needed = static_cast<uint64_t>(requested) * block_bytes;
        if (needed > available) {
            throw std::invalid_argument(
                "kv_cache_blocks is " + std::to_string(requested) + ", which takes " +
                std::to_string(needed >> 20) + " MiB; " + std::to_string(available >> 20) +
                " MiB are available: choose at most " + std::to_string(available / block_bytes));
        }
        return {requested, "option"};
    }
    const int64_t wanted =
        std::min<int64_t>(int64_t{limits.max_batch_size} * blocks_for_tokens(limits.max_seq_len),
                          std::numeric_limits<int32_t>::max() / 2);
    const auto affordable = static_cast<int64_t>(by_default / std::max<uint64_t>(block_bytes, 1));
    if (affordable >= wanted) return {static_cast<int>(wanted), "limits"};
    return {static_cast<int>(std::max<int64_t>(affordable, 1)), "memory"};
}

}  // namespace castiron
