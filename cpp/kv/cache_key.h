// Who may share cached keys and values, and how long they are worth keeping.
#pragma once

#include <compare>
#include <cstdint>

namespace castiron {

// What besides the tokens decides whether two sequences may share blocks: a digest of a tenant's secret, and
// the adapter under which keys and values were computed. Sequences of different salts share nothing. The
// digest is compared whole, so it must come from a cryptographic hash.
struct CacheSalt {
    uint64_t high = 0;
    uint64_t low = 0;
    int64_t adapter = 0;  // 0: none

    auto operator<=>(const CacheSalt&) const = default;
};

// How one sequence uses the prefix cache.
struct CacheUse {
    bool enabled = false;  // false: its blocks are its own, and gone when it ends
    int32_t priority = 0;  // of its blocks; the larger, the sooner they are evicted
    CacheSalt salt;
};

}  // namespace castiron
