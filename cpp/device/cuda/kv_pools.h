// The paged KV cache in device memory: a pool of blocks for all layers, or two where layers with a window are
// kept apart.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "device/batch_check.h"
#include "device/cuda/handles.h"
#include "device/cuda/kv_layout.h"
#include "device/cuda/memory_plan.h"
#include "device/cuda/probe.h"
#include "device/device.h"
#include "program/program.h"

namespace castiron::cuda {

class KvPools {
public:
    // Throws as kv_layout().
    explicit KvPools(std::span<const KvLayer> layers) : layers_(layers), layout_(kv_layout(layers)) {}

    // Bytes from one block of a group to the next; of both groups together.
    [[nodiscard]] uint64_t stride(KvGroup group) const { return layout_.stride(group); }
    [[nodiscard]] uint64_t block_bytes() const { return stride(KvGroup::kAll) + stride(KvGroup::kWindow); }
    [[nodiscard]] const PoolBlocks& blocks() const { return blocks_; }

    // Throws refuse_memory()'s error where the pools do not fit.
    void reserve(const Driver& driver, const PoolBlocks& blocks, const MemoryPlan& plan, const Gpu& gpu);

    // A layer's keys and values in block 0.
    [[nodiscard]] Address k_cache(size_t layer) const { return pool(layer) + layout_.k_offsets[layer]; }
    [[nodiscard]] Address v_cache(size_t layer) const { return pool(layer) + layout_.v_offsets[layer]; }

    // A block of a group: its part in either pool where nothing is kept apart. In the order of the stream,
    // so that steps before and after see what they should. Throw std::invalid_argument for a block that the
    // pool does not have, and what check() does.
    void copy(const Driver& driver, KvGroup group, int from, int to, StreamHandle stream) const;
    void save(const Driver& driver, KvGroup group, int block, std::byte* to, StreamHandle stream) const;
    void load(const Driver& driver, KvGroup group, const std::byte* from, int block,
              StreamHandle stream) const;

private:
    [[nodiscard]] static size_t index(KvGroup group) { return static_cast<size_t>(group); }
    [[nodiscard]] Address pool(size_t layer) const { return pools_[index(group_of(layers_[layer]))].get(); }
    [[nodiscard]] int blocks_of(KvGroup group) const;
    [[nodiscard]] Address block_at(KvGroup group, int block) const;
    // call(part, bytes, where they begin in a block outside of the pools)
    template <typename Call>
    void for_parts(KvGroup group, Call call) const;

    std::span<const KvLayer> layers_;
    KvLayout layout_;
    PoolBlocks blocks_;
    std::array<DeviceBuffer, 2> pools_;  // by KvGroup
};

}  // namespace castiron::cuda
