#include "device/host/kv_cache.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "device/half.h"

namespace castiron::host {
namespace {

constexpr int kSlots = 32;
// A vector of values may be read past the end of the last row.
constexpr size_t kPadding = 64;

// Nearest whole number within ±127, ties to even; not-a-number becomes 127.
int8_t to_int8(float value) {
    return static_cast<int8_t>(std::lrint(std::max(std::min(127.0f, value), -127.0f)));
}

// float8 e4m3fn: nearest, ties to even, saturated at ±448; not-a-number stays one.
uint8_t to_e4m3(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
    if (std::isnan(value)) return sign | 0x7fu;
    const float magnitude = std::min(std::abs(value), 448.0f);
    if (magnitude < 0x1p-6f) return sign | static_cast<uint8_t>(std::lrint(magnitude * 0x1p9f));
    auto rounded = std::bit_cast<uint32_t>(magnitude);
    rounded += 0x7ffffu + (rounded >> 20 & 1u);
    return sign | static_cast<uint8_t>((rounded >> 20) - (120u << 3));  // exponents of a float are 120 more
}

// as(number, scale of its head) gives what is stored.
template <typename T, typename As>
void write_token(const KvCache::LayerView& l, std::byte* block, int slot, const float* k, const float* v,
                 As as) {
    auto* keys = reinterpret_cast<T*>(block);
    auto* values = reinterpret_cast<T*>(block + l.v_offset);
    const int64_t depth = l.shape.head_dim, width = l.shape.v_head_dim;
    for (int64_t h = 0; h < l.shape.kv_heads; ++h) {
        const float k_scale = l.k_scale(h), v_scale = l.v_scale(h);
        for (int64_t i = h * depth; i < (h + 1) * depth; ++i) keys[i * kSlots + slot] = as(k[i], k_scale);
        T* to = values + (h * kSlots + slot) * width;
        for (int64_t i = 0; i < width; ++i) to[i] = as(v[h * width + i], v_scale);
    }
}

// Rounded a run at a time, then put where they belong.
template <typename F>
void for_rounded(const float* from, int64_t n, F f) {
    std::array<uint16_t, 64> run;
    for (int64_t begin = 0; begin < n; begin += 64) {
        const int64_t count = std::min<int64_t>(n - begin, 64);
        for (int64_t i = 0; i < count; ++i) run[static_cast<size_t>(i)] = to_bf16(from[begin + i]);
        f(begin, run.data(), count);
    }
}

void write_pairs(const KvCache::LayerView& l, std::byte* block, int slot, const float* k, const float* v) {
    const int64_t depth = l.shape.head_dim, width = l.shape.v_head_dim, lines = (depth + 1) / 2;
    auto* keys = reinterpret_cast<uint16_t*>(block) + slot * 2;
    auto* values = reinterpret_cast<uint16_t*>(block + l.v_offset) + slot / 2 * width * 2 + slot % 2;
    for (int64_t h = 0; h < l.shape.kv_heads; ++h, k += depth, v += width) {
        for_rounded(k, depth, [&](int64_t begin, const uint16_t* from, int64_t count) {
            uint16_t* to = keys + begin / 2 * kSlots * 2;
            for (int64_t i = 0; i + 2 <= count; i += 2) std::memcpy(to + i * kSlots, from + i, 4);
            if (count % 2 != 0) to[(count - 1) * kSlots] = from[count - 1];
        });
        for_rounded(v, width, [&](int64_t begin, const uint16_t* from, int64_t count) {
            for (int64_t i = 0; i < count; ++i) values[(begin + i) * 2] = from[i];
        });
        keys += lines * kSlots * 2;
        values += width * kSlots;
    }
}

// Bytes of an element, or 0 for what no cache holds.
size_t element_bytes(DType dtype) {
    switch (dtype) {
        case DType::kF32:
            return 4;
        case DType::kBF16:
            return 2;
        case DType::kI8:
        case DType::kF8E4M3:
            return 1;
        default:
            return 0;
    }
}

void check_scales(const KvLayer& layer, const std::string& where) {
    const bool scaled = element_bytes(layer.dtype) == 1;
    for (const std::vector<float>* scales : {&layer.k_scale, &layer.v_scale}) {
        const bool positive = std::all_of(scales->begin(), scales->end(),
                                          [](float scale) { return scale > 0 && std::isfinite(scale); });
        if (!scales->empty() &&
            (!scaled || !positive || scales->size() != static_cast<size_t>(layer.kv_heads))) {
            throw std::invalid_argument(where +
                                        ": k_scale and v_scale hold one positive number for each KV head, or "
                                        "none, of a cache of i8 or f8e4m3");
        }
    }
}

}  // namespace

KvCache::KvCache(const std::vector<KvLayer>& layers) {
    for (const KvLayer& layer : layers) {
        const std::string where = "KV layer " + std::to_string(layers_.size());
        const auto in = [](int value) { return value >= 1 && value <= 4096; };
        const size_t element = element_bytes(layer.dtype);
        if (!in(layer.kv_heads) || !in(layer.head_dim) || !in(layer.v_head_dim) || element == 0) {
            throw std::invalid_argument(
                where +
                ": kv_heads, head_dim and v_head_dim must be 1 to 4096, dtype f32, bf16, i8 or f8e4m3");
        }
        check_scales(layer, where);
        LayerView view;
        view.shape = layer;
        const auto heads = static_cast<size_t>(layer.kv_heads);
        const int depth = layer.dtype == DType::kBF16 ? (layer.head_dim + 1) / 2 * 2 : layer.head_dim;
        view.v_offset = heads * static_cast<size_t>(depth) * kSlots * element;
        view.block_bytes = view.v_offset + heads * static_cast<size_t>(layer.v_head_dim) * kSlots * element;
        place(view, group_of(layer));
        layers_.push_back(view);
    }
}

// Behind the layers that are there.
void KvCache::place(LayerView& view, KvGroup group) {
    uint64_t& bytes = pools_[index(group)].block_bytes;
    view.group = group;
    view.pool_offset = bytes;
    bytes += view.block_bytes;
}

void KvCache::reserve(int num_blocks, int window_blocks, bool huge_pages) {
    if (num_blocks < 1) throw std::invalid_argument("a KV pool needs at least one block");
    if (window_blocks < 0 || window_blocks > num_blocks)
        throw std::invalid_argument("a KV pool has no more window blocks than blocks");
    if (window_blocks == 0) {  // all in one
        for (Pool& pool : pools_) pool.block_bytes = 0;
        for (LayerView& view : layers_) place(view, KvGroup::kAll);
    }
    for (const KvGroup group : {KvGroup::kAll, KvGroup::kWindow}) {
        Pool& pool = pools_[index(group)];
        pool.num_blocks = group == KvGroup::kAll ? num_blocks : window_blocks;
        uint64_t bytes = 0;
        if (__builtin_mul_overflow(pool.block_bytes, static_cast<uint64_t>(pool.num_blocks), &bytes) ||
            bytes > uint64_t{1} << 46) {
            throw std::invalid_argument("a KV pool of " + std::to_string(pool.num_blocks) + " blocks of " +
                                        std::to_string(pool.block_bytes) + " bytes is too large");
        }
        pool.memory = HugeBuffer(bytes + kPadding, huge_pages);
    }
}

int KvCache::checked(KvGroup group, int block) const {
    if (block < 0 || block >= num_blocks(group)) throw std::invalid_argument("KV block out of range");
    return block;
}

void KvCache::copy_block(KvGroup group, int from, int to) {
    checked(group, from);
    if (from == checked(group, to)) return;
    for (size_t i = 0; i < layers_.size(); ++i) {
        if (layers_[i].group != group) continue;
        std::memcpy(block_at(i, to), block_at(i, from), layers_[i].block_bytes);
    }
}

void KvCache::save_block(KvGroup group, int block, std::byte* to) const {
    checked(group, block);
    for (size_t i = 0; i < layers_.size(); ++i) {
        if (layers_[i].group != group) continue;
        std::memcpy(to, block_at(i, block), layers_[i].block_bytes);
        to += layers_[i].block_bytes;
    }
}

void KvCache::load_block(KvGroup group, const std::byte* from, int block) {
    checked(group, block);
    for (size_t i = 0; i < layers_.size(); ++i) {
        if (layers_[i].group != group) continue;
        std::memcpy(block_at(i, block), from, layers_[i].block_bytes);
        from += layers_[i].block_bytes;
    }
}

void KvCache::write(size_t layer, int32_t block, int slot, const float* k, const float* v) const {
    const LayerView& l = layers_[layer];
    std::byte* at = block_at(layer, block);
    switch (l.shape.dtype) {
        case DType::kBF16:
            return write_pairs(l, at, slot, k, v);
        case DType::kI8:
            return write_token<int8_t>(l, at, slot, k, v, [](float x, float s) { return to_int8(x / s); });
        case DType::kF8E4M3:
            return write_token<uint8_t>(l, at, slot, k, v, [](float x, float s) { return to_e4m3(x / s); });
        default:
            return write_token<float>(l, at, slot, k, v, [](float x, float) { return x; });
    }
}

}  // namespace castiron::host
