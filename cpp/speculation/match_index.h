// Where in a growing sequence of tokens its own end has occurred before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace castiron {

// Every pair of neighbouring tokens is in a chain with the earlier pairs of the same hash, latest first, as
// in a Lempel-Ziv compressor: a token is taken in by two writes, and a look goes through the latest
// kMostLooks entries of one chain. Allocates in the constructor only.
class MatchIndex {
public:
    static constexpr int kShortest = 2;    // tokens of a match
    static constexpr int kMostLooks = 32;  // places that one look compares

    // The tokens before `next` equal the last `length` tokens of the sequence; token `next` followed them.
    struct Match {
        int next = 0;
        int length = 0;  // 0: there is none
    };

    explicit MatchIndex(size_t most_tokens);

    // The sequence has grown to `tokens`.
    void extend(std::span<const int32_t> tokens);
    // The longest matches of at most `longest` tokens, latest first; returns how many. The place `hint` is
    // looked at besides those of the chain, and of equal matches it is the first.
    [[nodiscard]] size_t find(std::span<const int32_t> tokens, int longest, int hint,
                              std::span<Match> matches) const;

private:
    [[nodiscard]] size_t slot(int32_t before, int32_t last) const;

    static constexpr int32_t kNone = -1;
    std::vector<int32_t> latest_;   // by hash: the last token of the latest pair
    std::vector<int32_t> earlier_;  // by place: that of the pair before it
    size_t known_ = 1;              // pairs that end before this token are in the chains
};

}  // namespace castiron
