// A fixed number of slots that are found by the path of tokens whose block they hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/cache_key.h"
#include "kv/digest.h"

namespace castiron {

// Names a block by all that its keys and values depend on: its tokens, those before them and the salt.
struct PathKey {
    Digest digest{};

    bool operator==(const PathKey&) const = default;
};

// The key of a block of kBlockTokens tokens behind `parent`, or, without one, of a first block.
[[nodiscard]] PathKey path_key(const PathKey* parent, const CacheSalt& salt, std::span<const int32_t> tokens);

// Slots, each empty or of one key, in the order of their last use. All memory is taken by the constructor.
class KeyedSlots {
public:
    static constexpr int32_t kNone = -1;

    explicit KeyedSlots(int count);

    [[nodiscard]] int total() const { return static_cast<int>(keys_.size()); }
    [[nodiscard]] int filled() const { return filled_; }
    [[nodiscard]] bool is_filled(int32_t slot) const { return filled_flags_[static_cast<size_t>(slot)] != 0; }
    [[nodiscard]] const PathKey& key(int32_t slot) const { return keys_[static_cast<size_t>(slot)]; }
    // The slot of this key, or kNone.
    [[nodiscard]] int32_t find(const PathKey& key) const;
    // The slot used least recently, empty ones before all others; then the next one, and at last kNone.
    [[nodiscard]] int32_t oldest() const { return next_[keys_.size()]; }
    [[nodiscard]] int32_t next(int32_t slot) const {
        const int32_t after = next_[static_cast<size_t>(slot)];
        return after == total() ? kNone : after;
    }
    // Gives the slot to a key that no other slot has, as the one used last.
    void assign(int32_t slot, const PathKey& key);
    // The slot was used.
    void touch(int32_t slot);
    // Empties the slot, if it is not.
    void clear(int32_t slot);

private:
    [[nodiscard]] size_t home(const PathKey& key) const { return key.digest[1] & (table_.size() - 1); }
    void unlink(int32_t slot);
    void link_before(int32_t slot, int32_t after);

    std::vector<PathKey> keys_;
    std::vector<uint8_t> filled_flags_;
    // A ring in the order of use; the entry behind the last slot is its head.
    std::vector<int32_t> next_, previous_;
    std::vector<int32_t> table_;  // open addressing; a power of two, at most half full
    int filled_ = 0;
};

}  // namespace castiron
