// A request of a fuzzer's, and what it may and must find in the prefix cache: told from everybody's tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "batching/request.h"

namespace castiron::testing {

struct Life {
    std::unique_ptr<Request> request;
    bool failed_allowed = false;  // a device failure or poisoned logits may end it
    int num_kept = 0;             // at the last look
    int least_cached = 0;         // tokens that the cache held for it when it came
    int most_cached = 0;          // tokens that it has in common with somebody
};

// Tokens of it that its blocks in the cache can be for; those of beams are never kept.
inline int num_kept(const Request& request) {
    return std::min(request.num_computed,
                    request.beams == nullptr ? request.num_tokens() : request.prompt_tokens);
}

// Whether one looks in the cache for what the other leaves there.
inline bool looks_for(const Request& reader, const Request& writer) {
    const CacheUse& reads = reader.block_table.cache_use();
    const CacheUse& writes = writer.block_table.cache_use();
    return reads.enabled && writes.enabled && !reader.params.context_logits && reads.salt == writes.salt;
}

// Tokens that both begin with, of a prompt all but the last.
inline int num_common(std::span<const int32_t> prompt, std::span<const int32_t> others) {
    others = others.first(std::min(others.size(), prompt.size() - 1));
    return static_cast<int>(std::mismatch(others.begin(), others.end(), prompt.begin()).first -
                            others.begin());
}

// Of one that has just come: what the cache has for it, and what may come there while it waits.
inline void expect_cached(Life& life, std::vector<Life>& others) {
    const Request& mine = *life.request;
    const int most = mine.prompt_tokens - 1;
    for (Life& other : others) {
        const Request& theirs = *other.request;
        const bool ended = theirs.state == RequestState::kFinished;
        if (looks_for(mine, theirs)) {
            const int shared = num_common(mine.prompt(), theirs.tokens);
            // They may still grow, and be equal for as long as this prompt is.
            const bool grows = !ended && shared == std::min(theirs.num_tokens(), most);
            life.most_cached = std::max(life.most_cached, grows ? most : shared);
            if (ended && theirs.finish_reason != FinishReason::kError) {
                const int full = other.num_kept / kBlockTokens * kBlockTokens;
                life.least_cached = std::max(life.least_cached, std::min(shared, full));
            }
        }
        // Whoever is here may find what this one computes.
        if (!ended && theirs.num_output() == 0 && looks_for(theirs, mine))
            other.most_cached = theirs.prompt_tokens - 1;
    }
}

}  // namespace castiron::testing
