#include "sampling/token_counts.h"

#include <bit>

namespace castiron {

TokenCounts::TokenCounts(size_t most_tokens) : table_(std::bit_ceil(2 * most_tokens + 1), kFree) {
    entries_.reserve(most_tokens);
}

void TokenCounts::note(int32_t token, bool in_output) {
    const size_t mask = table_.size() - 1;
    // Fibonacci hashing spreads runs of neighbouring ids.
    size_t slot = (static_cast<size_t>(static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15U >> 32) & mask;
    while (table_[slot] != kFree && entries_[static_cast<size_t>(table_[slot])].token != token) {
        slot = (slot + 1) & mask;
    }
    if (table_[slot] == kFree) {
        table_[slot] = static_cast<int32_t>(entries_.size());
        entries_.push_back({token, 0});
    }
    if (in_output) ++entries_[static_cast<size_t>(table_[slot])].count;
}

}  // namespace castiron
