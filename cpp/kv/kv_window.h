// How far back a model's attention looks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/device.h"

namespace castiron {

// Of a model whose every layer has a sliding window: what a sequence must keep of its past.
struct KvWindow {
    int tokens = 0;         // a token sees so many, itself among them; 0: all that came before it
    int longest_chunk = 0;  // tokens of a sequence in one step

    // Tokens that are kept, the one that is computed among them. The block before that which is being filled
    // is so in any case: the prefix tree hangs the next one on it.
    [[nodiscard]] int reach() const { return std::max(tokens, kBlockTokens + 1); }
    // The first position whose keys and values somebody at `position` or behind it may read.
    [[nodiscard]] int first_kept(int position) const {
        return tokens == 0 ? 0 : std::max(position - reach() + 1, 0);
    }
    // The most blocks that a sequence of max_tokens holds at a time.
    [[nodiscard]] int most_blocks(int64_t max_tokens) const {
        const auto blocks = [](int64_t count) { return (count + kBlockTokens - 1) / kBlockTokens; };
        const int64_t life = blocks(max_tokens);
        if (tokens == 0) return static_cast<int>(life);
        return static_cast<int>(std::min(life, blocks(int64_t{reach()} + longest_chunk) + 1));
    }
};

}  // namespace castiron
