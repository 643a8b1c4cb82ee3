// The paged KV pool: blocks of 32 tokens, one block table per sequence for all layers.
//
// Inside a layer's block: keys [kv_head][head_dim][32], token last, so that a vector holds the scores of many
// keys; then values [kv_head][32][v_head_dim]. Of bf16 two lie side by side, as vectors and the tiles of AMX
// both take them: keys [kv_head][head_dim / 2, rounded up][32][2], values [kv_head][16][v_head_dim][2].
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/host/memory.h"
#include "program/program.h"

namespace castiron::host {

class KvCache {
public:
    struct LayerView {
        KvLayer shape;
        size_t block_bytes = 0;    // of this layer
        size_t v_offset = 0;       // values behind the keys
        uint64_t pool_offset = 0;  // of the layer's first block, per block of the pool

        // What a stored number stands for one of.
        [[nodiscard]] float k_scale(int64_t head) const { return scale_of(shape.k_scale, head); }
        [[nodiscard]] float v_scale(int64_t head) const { return scale_of(shape.v_scale, head); }
        [[nodiscard]] static float scale_of(const std::vector<float>& scales, int64_t head) {
            return scales.empty() ? 1.0f : scales[static_cast<size_t>(head)];
        }
    };

    // Throws std::invalid_argument on a layer of impossible size.
    explicit KvCache(const std::vector<KvLayer>& layers);

    [[nodiscard]] uint64_t block_bytes() const { return block_bytes_; }
    [[nodiscard]] int num_blocks() const { return num_blocks_; }
    [[nodiscard]] size_t num_layers() const { return layers_.size(); }
    [[nodiscard]] const LayerView& layer(size_t i) const { return layers_[i]; }
    // The layer's first block; blocks of a layer lie one after the other.
    [[nodiscard]] std::byte* data(size_t layer) const {
        return pool_.data() + layers_[layer].pool_offset * static_cast<uint64_t>(num_blocks_);
    }

    void reserve(int num_blocks, bool huge_pages);
    void copy_block(int from, int to);
    // Between a block and block_bytes() of memory, layer after layer.
    void save_block(int block, std::byte* to) const;
    void load_block(const std::byte* from, int block);
    // Stores keys [kv_heads * head_dim] and values [kv_heads * v_head_dim] of one token.
    void write(size_t layer, int32_t block, int slot, const float* k, const float* v) const;

private:
    // The block itself; throws std::invalid_argument for one that the pool does not have.
    int checked(int block) const;
    [[nodiscard]] std::byte* block_at(size_t layer, int block) const {
        return data(layer) + static_cast<size_t>(block) * layers_[layer].block_bytes;
    }

    std::vector<LayerView> layers_;
    uint64_t block_bytes_ = 0;
    int num_blocks_ = 0;
    HugeBuffer pool_;
};

}  // namespace castiron::host
