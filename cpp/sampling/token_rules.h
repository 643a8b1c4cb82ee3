// What a request forbids, and what it adds to logits, before anything is drawn.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace castiron {

struct TokenBias {
    int32_t token = 0;
    float bias = 0;
};

// Applied in the order of the members. Tokens outside the row are ignored.
struct TokenRules {
    std::vector<int32_t> allowed;  // the only tokens that may be chosen; empty: all
    // No output may contain one of these runs of tokens: the last token of a run is forbidden where the rest
    // of it has just been generated.
    std::vector<std::vector<int32_t>> bad_words;
    // No run of so many tokens may appear twice in prompt and output together; 0: off.
    int no_repeat_ngram = 0;
    std::vector<TokenBias> bias;

    [[nodiscard]] bool empty() const {
        return allowed.empty() && bad_words.empty() && no_repeat_ngram == 0 && bias.empty();
    }
    // Throws std::invalid_argument naming the field, what it is and what it may be.
    void validate(int vocab_size) const;
    // row: logits [vocab_limit], changed in place. A forbidden token gets -infinity.
    void apply(std::span<float> row, std::span<const int32_t> prompt, std::span<const int32_t> output) const;
};

// Forbids the tokens whose bit is not set: bit t % 32 of word t / 32. Tokens behind the last word are
// forbidden.
void apply_mask(std::span<const uint32_t> mask, std::span<float> row);

}  // namespace castiron
