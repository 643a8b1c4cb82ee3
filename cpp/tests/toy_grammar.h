// A grammar that needs no compiler: what may come next follows from all that came before.
#pragma once

#include <cstdint>
#include <span>

namespace castiron::testing {

// Bits of the tokens that may follow `output`: two thirds of a vocabulary of at most 32.
inline uint32_t toy_grammar(std::span<const int32_t> output) {
    uint32_t hash = 2166136261U;
    for (const int32_t token : output) hash = (hash ^ static_cast<uint32_t>(token)) * 16777619U;
    uint32_t mask = 0;
    for (uint32_t token = 0; token < 32; ++token) {
        if ((token + (hash >> 7)) % 3 != 0) mask |= uint32_t{1} << token;
    }
    return mask;
}

}  // namespace castiron::testing
