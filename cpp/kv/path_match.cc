// How a sequence goes on from what the cache has, of a model of which some layers have a window: a path's
// blocks are of use up to where the next token finds the window blocks that it sees.
#include <algorithm>
#include <stdexcept>

#include "kv/block_table.h"

namespace castiron {
namespace {

std::span<const int32_t> tokens_of(std::span<const int32_t> tokens, int place) {
    return tokens.subspan(static_cast<size_t>(place) * kBlockTokens, kBlockTokens);
}

// Walks down the tree, and behind its end through what the host tier has.
class PathWalk {
public:
    PathWalk(const BlockPool& pool, const CacheSalt& salt, int32_t from)
        : pool_(pool), salt_(salt), block_(from) {}

    // To the child of these tokens; false where nobody has it.
    [[nodiscard]] bool step(std::span<const int32_t> tokens, bool with_tier) {
        if (in_tree_) {
            const PrefixTree::Found found = pool_.tree().find(block_, salt_, tokens);
            if (found.tokens == kBlockTokens) {
                block_ = found.block;
                return true;
            }
            if (!with_tier) return false;
            key_ = pool_.key_below(block_, salt_, tokens);
            in_tree_ = false;
        } else {
            key_ = path_key(&key_, salt_, tokens);
        }
        return with_tier && pool_.tiers().blocks->contains(key_);
    }
    [[nodiscard]] bool in_tree() const { return in_tree_; }
    [[nodiscard]] int32_t block() const { return block_; }
    [[nodiscard]] const PathKey& key() const { return in_tree_ ? pool_.key(block_) : key_; }
    [[nodiscard]] bool has_window() const { return in_tree_ && pool_.window_of(block_) != WindowPool::kNone; }

private:
    const BlockPool& pool_;
    const CacheSalt& salt_;
    int32_t block_;
    PathKey key_;
    bool in_tree_ = true;
};

}  // namespace

// Full blocks up to the last place behind `computed` that the sequence can go on from; 0: there is none.
int BlockTable::match(const BlockPool& pool, std::span<const int32_t> tokens, int computed,
                      bool with_tiers) const {
    const auto full = static_cast<int>(tokens.size()) / kBlockTokens;
    int whole = windows_.first();  // the first place from which on every one has its window block
    int spare = pool.available();
    int best = 0;
    PathWalk walk(pool, use_.salt, path_end());
    for (int place = num_cached_; place < full; ++place) {
        const bool has_place = place < num_places();
        if (!walk.step(tokens_of(tokens, place), with_tiers && has_place)) break;
        if (!has_place && pool.references(walk.block()) == 0 && --spare < 0) break;
        if (!walk.has_window() && !(with_tiers && pool.tiers().windows->contains(walk.key())))
            whole = std::max(whole, place + 1);
        const int blocks = place + 1;
        if (blocks * kBlockTokens > computed && whole <= window_.first_kept(blocks * kBlockTokens))
            best = blocks;
    }
    return best;
}

// Holds what of these blocks is in the tiers alone there, until it is loaded.
bool BlockTable::pin(BlockPool& pool, std::span<const int32_t> tokens, int blocks) const {
    const int first = window_.first_kept(blocks * kBlockTokens);
    PathWalk walk(pool, use_.salt, path_end());
    for (int place = num_cached_; place < blocks; ++place) {
        if (!walk.step(tokens_of(tokens, place), true)) return false;
        if (!walk.in_tree() && !pool.pin(walk.key())) return false;
        if (place >= first && !walk.has_window() && !pool.pin_window(walk.key())) return false;
    }
    return true;
}

// Takes these blocks as its own, all of which are there.
void BlockTable::follow(BlockPool& pool, std::span<const int32_t> tokens, int blocks) {
    windows_.stop(pool, blocks_);
    while (num_cached_ < blocks) {
        const auto part = tokens_of(tokens, num_cached_);
        const PrefixTree::Found found = pool.tree().find(path_end(), use_.salt, part);
        if (found.tokens == kBlockTokens) {
            if (!share(pool, found.block)) throw std::logic_error("a KV block that was there is gone");
            continue;
        }
        if (num_cached_ == static_cast<int>(blocks_.size())) take_block(pool);
        load(pool, part);
    }
    windows_.start(pool, blocks_);
    next_slide_ = next_slide();
}

int BlockTable::reuse_windows(BlockPool& pool, std::span<const int32_t> tokens, int computed,
                              std::optional<BlockCopy>& copy) {
    for (int with_tiers = pool.tiers().blocks != nullptr ? 1 : 0; with_tiers >= 0; --with_tiers) {
        const int blocks = match(pool, tokens, computed, with_tiers != 0);
        if (blocks == 0) break;
        if (!windows_.promise(pool, blocks)) return computed;
        const bool there = with_tiers == 0 || pin(pool, tokens, blocks);
        if (there) follow(pool, tokens, blocks);
        if (with_tiers != 0) pool.unpin();
        if (!there) continue;  // the tiers' memory is too small for it
        computed = blocks * kBlockTokens;
        break;
    }
    const int begin = num_cached_ * kBlockTokens;
    if (begin >= static_cast<int>(tokens.size())) return computed;
    const auto found = pool.tree().find(path_end(), use_.salt, tokens.subspan(static_cast<size_t>(begin)));
    const int end = begin + found.tokens;
    const bool part = found.tokens < kBlockTokens && end > computed;
    return part && pool.window_of(found.block) != WindowPool::kNone && copy_from(pool, found.block, copy)
               ? end
               : computed;
}

}  // namespace castiron
