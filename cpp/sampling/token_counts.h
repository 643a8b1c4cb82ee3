// Which tokens a request has seen, and how often each is in its output: what penalties look at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace castiron {

// Counts of at most as many tokens as it was made for; allocates in the constructor only.
class TokenCounts {
public:
    struct Entry {
        int32_t token = 0;
        int32_t count = 0;  // in the output
    };

    TokenCounts() = default;
    explicit TokenCounts(size_t most_tokens);

    // Notes a token of the prompt (count stays) or of the output (count grows by one).
    void note(int32_t token, bool in_output);
    // Every token that was noted, once.
    [[nodiscard]] std::span<const Entry> entries() const { return entries_; }

private:
    std::vector<Entry> entries_;
    std::vector<int32_t> table_;  // open addressing: indices into entries_, or kFree
    static constexpr int32_t kFree = -1;
};

}  // namespace castiron
