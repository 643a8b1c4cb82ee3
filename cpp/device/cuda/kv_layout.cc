#include "device/cuda/kv_layout.h"

#include <stdexcept>
#include <string>

#include "device/device.h"
#include "program/sizes.h"

namespace castiron::cuda {
namespace {

constexpr uint64_t kAlignment = 256;

uint64_t aligned(uint64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

KvLayout kv_layout(std::span<const KvLayer> layers) {
    const auto in = [](int size) { return size >= 1 && size <= 4096; };
    KvLayout layout;
    for (const KvLayer& layer : layers) {
        if (!in(layer.kv_heads) || !in(layer.head_dim) || !in(layer.v_head_dim) ||
            layer.dtype == DType::kI32) {
            throw std::invalid_argument("KV layer " + std::to_string(layout.k_offsets.size()) +
                                        ": kv_heads, head_dim and v_head_dim must be 1 to 4096, dtype f32, "
                                        "bf16, f16, i8 or f8e4m3");
        }
        const uint64_t row = static_cast<uint64_t>(kBlockTokens) * static_cast<uint64_t>(layer.kv_heads) *
                             item_bytes(layer.dtype);
        uint64_t& end = layout.strides[static_cast<size_t>(group_of(layer))];
        layout.k_offsets.push_back(end);
        end += aligned(row * static_cast<uint64_t>(layer.head_dim));
        layout.v_offsets.push_back(end);
        end += aligned(row * static_cast<uint64_t>(layer.v_head_dim));
    }
    return layout;
}

}  // namespace castiron::cuda
