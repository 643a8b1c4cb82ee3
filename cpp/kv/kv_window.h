// How far back a model's attention looks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/device.h"

namespace castiron {

// The blocks that so many tokens take.
[[nodiscard]] constexpr int blocks_for_tokens(int64_t tokens) {
    return static_cast<int>((tokens + kBlockTokens - 1) / kBlockTokens);
}

// What a sequence must keep of its past, of a model whose layers have a sliding window: all of them, and then
// it lets go of whole blocks (BlockTable), or some, and then of these layers' part of them (WindowTable).
struct KvWindow {
    int tokens = 0;         // a token sees so many, itself among them; 0: all that came before it
    int longest_chunk = 0;  // tokens of a sequence in one step
    bool of_some = false;   // other layers see everything

    // Tokens that are kept, the one that is computed among them. The block before that which is being filled
    // is so in any case, if blocks are let go: the prefix tree hangs the next one on it. Of their parts that
    // of the last token is, so that there always is one.
    [[nodiscard]] int reach() const { return std::max(tokens, of_some ? 2 : kBlockTokens + 1); }
    // The place of the first block that somebody at `position` or behind it may read.
    [[nodiscard]] int first_kept(int position) const {
        return tokens == 0 ? 0 : std::max(position - reach() + 1, 0) / kBlockTokens;
    }
    // With a window: the position from which on nobody reads the block in this place.
    [[nodiscard]] int end_of(int place) const { return (place + 1) * kBlockTokens + reach() - 1; }
    // The most blocks that a sequence of max_tokens holds at a time.
    [[nodiscard]] int most_blocks(int64_t max_tokens) const {
        const int life = blocks_for_tokens(max_tokens);
        if (tokens == 0 || of_some) return life;
        return std::min(life, blocks_for_tokens(int64_t{reach()} + longest_chunk) + 1);
    }
    // The most window blocks that a sequence with so many blocks reads, one of its tokens being computed:
    // reach() positions touch so many. Each kBlockTokens that a step feeds it besides may be one more.
    [[nodiscard]] int most_window_blocks(int blocks) const {
        return tokens == 0 ? blocks : std::min(blocks, (reach() - 1) / kBlockTokens + 3);
    }
    // Those besides of all sequences of a step together.
    [[nodiscard]] static int window_blocks_of_step(int max_num_tokens) {
        return max_num_tokens / kBlockTokens;
    }
};

}  // namespace castiron
