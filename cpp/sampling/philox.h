// Philox4x32-10: random numbers as a function of (key, counter), without state.
// Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

namespace castiron {

[[nodiscard]] constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                                           std::array<uint32_t, 2> key) {
    constexpr int kRounds = 10;
    for (int round = 0; round < kRounds; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53U} * counter[0];
        const uint64_t product1 = uint64_t{0xCD9E8D57U} * counter[2];
        counter = {
            static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
            static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
        key[0] += 0x9E3779B9U;
        key[1] += 0xBB67AE85U;
    }
    return counter;
}

// Uniform in [0, 1) with 53 bits, for the token at `position` of the request with `seed`: the same wherever
// and next to whomever that request runs.
[[nodiscard]] constexpr double uniform_at(uint64_t seed, uint64_t position) {
    const auto bits =
        philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0},
                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    const uint64_t mantissa = ((uint64_t{bits[0]} << 32) | bits[1]) >> 11;
    return static_cast<double>(mantissa) * 0x1.0p-53;
}

}  // namespace castiron
