// The paged KV pools: blocks of 32 tokens, one block table per sequence for all layers, or one for those with
// a window of attention besides.
//
// Inside a layer's block: keys [kv_head][head_dim][32], token last, so that a vector holds the scores of many
// keys; then values [kv_head][32][v_head_dim]. Of bf16 two lie side by side, as vectors and the tiles of AMX
// both take them: keys [kv_head][head_dim / 2, rounded up][32][2], values [kv_head][16][v_head_dim][2].
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "device/host/memory.h"
#include "program/program.h"

namespace castiron::host {

class KvCache {
public:
    struct LayerView {
        KvLayer shape;
        KvGroup group = KvGroup::kAll;
        size_t block_bytes = 0;    // of this layer
        size_t v_offset = 0;       // values behind the keys
        uint64_t pool_offset = 0;  // of the layer's first block, per block of the pool of its group

        // What a stored number stands for one of.
        [[nodiscard]] float k_scale(int64_t head) const { return scale_of(shape.k_scale, head); }
        [[nodiscard]] float v_scale(int64_t head) const { return scale_of(shape.v_scale, head); }
        [[nodiscard]] static float scale_of(const std::vector<float>& scales, int64_t head) {
            return scales.empty() ? 1.0f : scales[static_cast<size_t>(head)];
        }
    };

    // Throws std::invalid_argument on a layer of impossible size.
    explicit KvCache(const std::vector<KvLayer>& layers);

    [[nodiscard]] uint64_t block_bytes(KvGroup group) const { return pools_[index(group)].block_bytes; }
    [[nodiscard]] int num_blocks(KvGroup group) const { return pools_[index(group)].num_blocks; }
    [[nodiscard]] const int32_t* table(size_t layer, const SequenceSlice& sequence) const {
        return layers_[layer].group == KvGroup::kAll ? sequence.block_table.data()
                                                     : sequence.window_table.data();
    }
    [[nodiscard]] size_t num_layers() const { return layers_.size(); }
    [[nodiscard]] const LayerView& layer(size_t i) const { return layers_[i]; }
    // The layer's first block; blocks of a layer lie one after the other.
    [[nodiscard]] std::byte* data(size_t layer) const {
        const LayerView& view = layers_[layer];
        const Pool& pool = pools_[index(view.group)];
        return pool.memory.data() + view.pool_offset * static_cast<uint64_t>(pool.num_blocks);
    }

    // window_blocks: 0 keeps nothing apart.
    void reserve(int num_blocks, int window_blocks, bool huge_pages);
    void copy_block(KvGroup group, int from, int to);
    // Between a block and block_bytes() of memory, layer after layer.
    void save_block(KvGroup group, int block, std::byte* to) const;
    void load_block(KvGroup group, const std::byte* from, int block);
    // Stores keys [kv_heads * head_dim] and values [kv_heads * v_head_dim] of one token.
    void write(size_t layer, int32_t block, int slot, const float* k, const float* v) const;

private:
    struct Pool {
        uint64_t block_bytes = 0;
        int num_blocks = 0;
        HugeBuffer memory;
    };

    [[nodiscard]] static size_t index(KvGroup group) { return static_cast<size_t>(group); }
    void place(LayerView& view, KvGroup group);
    // The block itself; throws std::invalid_argument for one that the pool does not have.
    int checked(KvGroup group, int block) const;
    [[nodiscard]] std::byte* block_at(size_t layer, int block) const {
        return data(layer) + static_cast<size_t>(block) * layers_[layer].block_bytes;
    }

    std::vector<LayerView> layers_;
    std::array<Pool, 2> pools_;
};

}  // namespace castiron::host
