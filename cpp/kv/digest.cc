#include "kv/digest.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace castiron {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr size_t kBlock = 128;
constexpr std::array<uint64_t, 8> kInitial{0x6A09E667F3BCC908U, 0xBB67AE8584CAA73BU, 0x3C6EF372FE94F82BU,
                                           0xA54FF53A5F1D36F1U, 0x510E527FADE682D1U, 0x9B05688C2B3E6C1FU,
                                           0x1F83D9ABFB41BD6BU, 0x5BE0CD19137E2179U};
// Which words of the block a round's eight mixings take, two each; rounds 10 and 11 are 0 and 1 again.
constexpr uint8_t kOrder[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
    a += b + x;
    d = std::rotr(d ^ a, 32);
    c += d;
    b = std::rotr(b ^ c, 24);
    a += b + y;
    d = std::rotr(d ^ a, 16);
    c += d;
    b = std::rotr(b ^ c, 63);
}

}  // namespace

Blake2b::Blake2b() : state_(kInitial) {
    state_[0] ^= 0x01010000U ^ sizeof(Digest);  // one fan-out, one level, no key
}

void Blake2b::compress(const std::byte* block, bool last) {
    std::array<uint64_t, 16> m;
    std::memcpy(m.data(), block, kBlock);
    std::array<uint64_t, 16> v;
    std::copy(state_.begin(), state_.end(), v.begin());
    std::copy(kInitial.begin(), kInitial.end(), v.begin() + 8);
    v[12] ^= hashed_;  // the upper half of the count is 0
    if (last) v[14] = ~v[14];
    for (size_t round = 0; round < 12; ++round) {
        const uint8_t* s = kOrder[round % 10];
        mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
        mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
        mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
        mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
        mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
        mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
        mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
        mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
    }
    for (size_t i = 0; i < 8; ++i) state_[i] ^= v[i] ^ v[i + 8];
}

void Blake2b::add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        // The last block is marked as such, so a full one waits until more comes.
        if (buffered_ == kBlock) {
            hashed_ += kBlock;
            compress(buffer_.data(), false);
            buffered_ = 0;
        }
        const size_t part = std::min(bytes.size(), kBlock - buffered_);
        std::memcpy(buffer_.data() + buffered_, bytes.data(), part);
        buffered_ += part;
        bytes = bytes.subspan(part);
    }
}

Digest Blake2b::finish() {
    hashed_ += buffered_;
    std::fill(buffer_.begin() + static_cast<std::ptrdiff_t>(buffered_), buffer_.end(), std::byte{0});
    compress(buffer_.data(), true);
    Digest digest;
    std::copy_n(state_.begin(), digest.size(), digest.begin());
    return digest;
}

Digest digest_of(std::span<const std::byte> bytes) {
    Blake2b hash;
    hash.add(bytes);
    return hash.finish();
}

}  // namespace castiron
