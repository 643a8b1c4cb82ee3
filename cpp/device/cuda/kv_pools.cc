#include "device/cuda/kv_pools.h"

#include <stdexcept>
#include <string>

namespace castiron::cuda {

void KvPools::reserve(const Driver& driver, const PoolBlocks& blocks, const MemoryPlan& plan,
                      const Gpu& gpu) {
    blocks_ = blocks;
    for (const KvGroup group : {KvGroup::kAll, KvGroup::kWindow}) {
        const uint64_t bytes = stride(group) * static_cast<uint64_t>(blocks_of(group));
        try {
            pools_[index(group)] = make_device_buffer(driver, bytes);
        } catch (const CudaError& error) {
            if (error.result() != Result::kOutOfMemory) throw;
            refuse_memory(
                plan, gpu, free_memory(driver),
                "a KV pool of " + std::to_string(blocks_of(group)) + " blocks (" + bytes_text(bytes) + ")");
        }
    }
}

// Blocks that the group's pool has. Where nothing is kept apart both have the same numbers.
int KvPools::blocks_of(KvGroup group) const {
    return group == KvGroup::kAll || blocks_.window_blocks == 0 ? blocks_.blocks : blocks_.window_blocks;
}

Address KvPools::block_at(KvGroup group, int block) const {
    if (block < 0 || block >= blocks_of(group)) throw std::invalid_argument("KV block out of range");
    return pools_[index(group)].get() + static_cast<uint64_t>(block) * stride(group);
}

template <typename Call>
void KvPools::for_parts(KvGroup group, Call call) const {
    uint64_t at = 0;
    for (const KvGroup part : {KvGroup::kAll, KvGroup::kWindow}) {
        const uint64_t bytes = stride(part);
        if (bytes == 0 || (part != group && blocks_.window_blocks > 0)) continue;
        call(part, bytes, at);
        at += bytes;
    }
}

void KvPools::copy(const Driver& driver, KvGroup group, int from, int to, StreamHandle stream) const {
    for_parts(group, [&](KvGroup part, uint64_t bytes, uint64_t) {
        check(driver, driver.copy_on_device(block_at(part, to), block_at(part, from), bytes, stream),
              "copying a KV block");
    });
}

void KvPools::save(const Driver& driver, KvGroup group, int block, std::byte* to, StreamHandle stream) const {
    for_parts(group, [&](KvGroup part, uint64_t bytes, uint64_t at) {
        check(driver, driver.copy_to_host(to + at, block_at(part, block), bytes, stream),
              "saving a KV block");
    });
}

void KvPools::load(const Driver& driver, KvGroup group, const std::byte* from, int block,
                   StreamHandle stream) const {
    for_parts(group, [&](KvGroup part, uint64_t bytes, uint64_t at) {
        check(driver, driver.copy_to_device(block_at(part, block), from + at, bytes, stream),
              "loading a KV block");
    });
}

}  // namespace castiron::cuda
