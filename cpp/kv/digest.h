// BLAKE2b (RFC 7693), 256 bits, without a key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace castiron {

using Digest = std::array<uint64_t, 4>;  // its bytes in order, on a little-endian machine

class Blake2b {
public:
    Blake2b();
    void add(std::span<const std::byte> bytes);
    // Of all that was added; nothing can be added after it.
    [[nodiscard]] Digest finish();

private:
    void compress(const std::byte* block, bool last);

    std::array<uint64_t, 8> state_;
    std::array<std::byte, 128> buffer_{};
    size_t buffered_ = 0;
    uint64_t hashed_ = 0;  // bytes
};

[[nodiscard]] Digest digest_of(std::span<const std::byte> bytes);

}  // namespace castiron
