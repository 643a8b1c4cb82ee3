#include "device/host/kv_cache.h"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace castiron::host {
namespace {

constexpr int kSlots = 32;
// A vector of values may be read past the end of the last row.
constexpr size_t kPadding = 64;

// To nearest, ties to even; not-a-number stays one.
uint16_t to_bf16(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float store_as(float value, float*) {
    return value;
}
uint16_t store_as(float value, uint16_t*) {
    return to_bf16(value);
}

template <typename T>
void write_token(const KvCache::LayerView& l, std::byte* block, int slot, const float* k, const float* v) {
    auto* keys = reinterpret_cast<T*>(block);
    auto* values = reinterpret_cast<T*>(block + l.v_offset);
    const int64_t rows = int64_t{l.shape.kv_heads} * l.shape.head_dim;
    for (int64_t i = 0; i < rows; ++i) keys[i * kSlots + slot] = store_as(k[i], static_cast<T*>(nullptr));
    const int64_t width = l.shape.v_head_dim;
    for (int64_t h = 0; h < l.shape.kv_heads; ++h) {
        T* to = values + (h * kSlots + slot) * width;
        for (int64_t i = 0; i < width; ++i) to[i] = store_as(v[h * width + i], static_cast<T*>(nullptr));
    }
}

}  // namespace

KvCache::KvCache(const std::vector<KvLayer>& layers) {
    for (const KvLayer& layer : layers) {
        const auto in = [](int value) { return value >= 1 && value <= 4096; };
        if (!in(layer.kv_heads) || !in(layer.head_dim) || !in(layer.v_head_dim) ||
            (layer.dtype != DType::kF32 && layer.dtype != DType::kBF16)) {
            throw std::invalid_argument(
                "KV layer " + std::to_string(layers_.size()) +
                ": kv_heads, head_dim and v_head_dim must be 1 to 4096, dtype f32 or bf16");
        }
        LayerView view;
        view.shape = layer;
        view.bf16 = layer.dtype == DType::kBF16;
        const size_t element = view.bf16 ? 2 : 4;
        const auto heads = static_cast<size_t>(layer.kv_heads);
        view.v_offset = heads * static_cast<size_t>(layer.head_dim) * kSlots * element;
        view.block_bytes = view.v_offset + heads * static_cast<size_t>(layer.v_head_dim) * kSlots * element;
        view.pool_offset = block_bytes_;
        block_bytes_ += view.block_bytes;
        layers_.push_back(view);
    }
}

void KvCache::reserve(int num_blocks, bool huge_pages) {
    if (num_blocks < 1) throw std::invalid_argument("a KV pool needs at least one block");
    uint64_t bytes = 0;
    if (__builtin_mul_overflow(block_bytes_, static_cast<uint64_t>(num_blocks), &bytes) ||
        bytes > uint64_t{1} << 46) {
        throw std::invalid_argument("a KV pool of " + std::to_string(num_blocks) + " blocks of " +
                                    std::to_string(block_bytes_) + " bytes is too large");
    }
    pool_ = HugeBuffer(bytes + kPadding, huge_pages);
    num_blocks_ = num_blocks;
}

void KvCache::copy_block(int from, int to) {
    if (from < 0 || to < 0 || from >= num_blocks_ || to >= num_blocks_)
        throw std::invalid_argument("KV block out of range");
    if (from == to) return;
    for (size_t i = 0; i < layers_.size(); ++i) {
        const size_t bytes = layers_[i].block_bytes;
        std::memcpy(data(i) + static_cast<size_t>(to) * bytes, data(i) + static_cast<size_t>(from) * bytes,
                    bytes);
    }
}

void KvCache::write(size_t layer, int32_t block, int slot, const float* k, const float* v) const {
    const LayerView& l = layers_[layer];
    std::byte* at = data(layer) + static_cast<size_t>(block) * l.block_bytes;
    if (l.bf16) {
        write_token<uint16_t>(l, at, slot, k, v);
    } else {
        write_token<float>(l, at, slot, k, v);
    }
}

}  // namespace castiron::host
