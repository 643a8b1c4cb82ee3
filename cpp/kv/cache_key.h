// Who may share cached keys and values, and how long they are worth keeping.
#pragma once

#include <compare>
#include <cstdint>

namespace castiron {

// A digest of what besides the tokens decides whether two sequences may share blocks: a tenant's secret.
// Sequences of different salts share nothing. Compared whole, so it must come from a cryptographic hash.
struct CacheSalt {
    uint64_t high = 0;
    uint64_t low = 0;

    auto operator<=>(const CacheSalt&) const = default;
};

// How one sequence uses the prefix cache.
struct CacheUse {
    bool enabled = false;  // false: its blocks are its own, and gone when it ends
    int32_t priority = 0;  // of its blocks; the larger, the sooner they are evicted
    CacheSalt salt;
};

}  // namespace castiron
