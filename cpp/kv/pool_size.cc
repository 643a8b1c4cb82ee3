#include "kv/pool_size.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <stdexcept>

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

namespace {

constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max() / 2;

// How many blocks, and window blocks for them.
class Split {
public:
    Split(const Limits& limits, const KvShape& shape)
        : shape_(shape), set_aside_(KvWindow::window_blocks_of_step(limits.max_num_tokens)) {
        const int64_t one = shape.window.most_window_blocks(blocks_for_tokens(limits.max_seq_len));
        least_ = one + set_aside_;
        needed_ = one * limits.max_batch_size + set_aside_;
    }

    [[nodiscard]] PoolSize of_blocks(int64_t blocks) const { return sized(blocks, needed_ + blocks / 8); }
    [[nodiscard]] PoolSize of_bytes(uint64_t bytes) const {
        const int64_t whole = fits(bytes, shape_.block_bytes + shape_.window_block_bytes);
        const int64_t windows = std::max(least_, std::min(needed_ + whole / 8, whole / 2));
        if (shape_.window_block_bytes == 0 || windows >= whole) return sized(whole, whole);
        const uint64_t rest = bytes - static_cast<uint64_t>(windows) * shape_.window_block_bytes;
        return sized(fits(rest, shape_.block_bytes), windows);
    }
    // The most that of_blocks() can be asked for in a memory.
    [[nodiscard]] int64_t most_blocks(uint64_t bytes) const {
        int64_t low = 0, high = fits(bytes, shape_.block_bytes);
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (bytes_of(of_blocks(middle), shape_) <= bytes) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return low;
    }

private:
    static int64_t fits(uint64_t bytes, uint64_t each) {
        return static_cast<int64_t>(
            std::min(bytes / std::max<uint64_t>(each, 1), static_cast<uint64_t>(kMostBlocks)));
    }
    // As many window blocks as blocks are none: then nothing is kept apart.
    [[nodiscard]] PoolSize sized(int64_t blocks, int64_t windows) const {
        PoolSize size;
        size.blocks = static_cast<int>(blocks);
        if (shape_.window_block_bytes == 0 || windows >= blocks) return size;
        size.window_blocks = static_cast<int>(windows);
        size.set_aside = set_aside_;
        return size;
    }

    const KvShape& shape_;
    int set_aside_;
    int64_t least_ = 0;   // window blocks, so that a sequence of full length runs
    int64_t needed_ = 0;  // so that max_batch_size of them run
};

std::string mib(uint64_t bytes) {
    return std::to_string(bytes >> 20) + " MiB";
}

PoolSize wished_size(const PoolWish& wish, const Split& split, const KvShape& shape, uint64_t available) {
    PoolSize size = wish.blocks > 0 ? split.of_blocks(wish.blocks) : split.of_bytes(wish.bytes);
    size.limited_by = "option";
    if (size.blocks < 1) {
        throw std::invalid_argument("kv_cache_memory is " + std::to_string(wish.bytes) +
                                    " bytes; one block of " + std::to_string(kBlockTokens) +
                                    " tokens takes " +
                                    std::to_string(shape.block_bytes + shape.window_block_bytes));
    }
    if (wish.blocks == 0 && wish.bytes > available) {
        throw std::invalid_argument("kv_cache_memory is " + mib(wish.bytes) + "; " + mib(available) +
                                    " are available");
    }
    if (bytes_of(size, shape) > available) {
        throw std::invalid_argument("kv_cache_blocks is " + std::to_string(wish.blocks) + ", which takes " +
                                    mib(bytes_of(size, shape)) + "; " + mib(available) +
                                    " are available: choose at most " +
                                    std::to_string(split.most_blocks(available)));
    }
    return size;
}

}  // namespace

uint64_t bytes_of(const PoolSize& size, const KvShape& shape) {
    const int windows = size.window_blocks > 0 ? size.window_blocks : size.blocks;
    return static_cast<uint64_t>(size.blocks) * shape.block_bytes +
           static_cast<uint64_t>(windows) * shape.window_block_bytes;
}

PoolSize choose_pool_size(const PoolWish& wish, const Limits& limits, const KvShape& shape,
                          uint64_t available, uint64_t by_default) {
    const Split split(limits, shape);
    if (wish.blocks > 0 || wish.bytes > 0) return wished_size(wish, split, shape, available);
    const int64_t wanted = std::min<int64_t>(
        int64_t{limits.max_batch_size} * blocks_for_tokens(limits.max_seq_len), kMostBlocks);
    PoolSize size = split.of_blocks(wanted);
    size.limited_by = "limits";
    if (bytes_of(size, shape) <= by_default) return size;
    size = split.of_bytes(by_default);
    size.limited_by = "memory";
    if (size.blocks >= wanted) size.blocks = static_cast<int>(wanted);
    size.blocks = std::max(size.blocks, 1);
    return size;
}

}  // namespace castiron
