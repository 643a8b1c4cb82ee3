#include "kv/prefix_tree.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace castiron {
namespace {

// A treap's heap order: as good as random, and fixed for a block (MurmurHash3's finalizer).
uint32_t rank_of(int32_t block) {
    auto x = static_cast<uint32_t>(block);
    x = (x ^ (x >> 16)) * 0x85EBCA6BU;
    x = (x ^ (x >> 13)) * 0xC2B2AE35U;
    return x ^ (x >> 16);
}

bool above(int32_t a, int32_t b) {
    const uint32_t ra = rank_of(a), rb = rank_of(b);
    return ra != rb ? ra > rb : a > b;
}

size_t common_prefix(const int32_t* a, const int32_t* b, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        if (std::memcmp(a + i, b + i, 8 * sizeof(int32_t)) != 0) break;
    }
    while (i < count && a[i] == b[i]) ++i;
    return i;
}

[[noreturn]] void broken(int32_t block, const std::string& what) {
    throw std::logic_error("the prefix tree's KV block " + std::to_string(block) + " " + what);
}

}  // namespace

PrefixTree::PrefixTree(int num_blocks) : nodes_(static_cast<size_t>(num_blocks)), salts_(nodes_.size()) {}

PrefixTree::Order PrefixTree::compare(const CacheSalt& salt, std::span<const int32_t> key,
                                      int32_t block) const {
    const Node& other = node(block);
    if (other.parent == kNone) {
        const auto by_salt = salt <=> salts_[static_cast<size_t>(block)];
        if (by_salt != 0) return {by_salt < 0 ? -1 : 1, 0};
    }
    const size_t count = std::min(key.size(), other.tokens.size());
    const size_t common = common_prefix(key.data(), other.tokens.data(), count);
    const int tokens = static_cast<int>(common);
    if (common == count) return {count == other.tokens.size() ? 0 : -1, tokens};
    return {key[common] < other.tokens[common] ? -1 : 1, tokens};
}

// The key's neighbours in the order of tokens have the most in common with it, and both are on the way down.
PrefixTree::Found PrefixTree::find(int32_t parent, const CacheSalt& salt,
                                   std::span<const int32_t> key) const {
    Found best;
    int32_t at = parent == kNone ? first_blocks_ : node(parent).children;
    while (at != kNone) {
        const Order order = compare(salt, key, at);
        if (order.common > best.tokens) best = {at, order.common};
        if (best.tokens == kBlockTokens || best.tokens == static_cast<int>(key.size())) break;
        at = order.sign < 0 ? node(at).left : node(at).right;
    }
    return best;
}

void PrefixTree::insert(int32_t block, int32_t parent, const CacheSalt& salt, std::span<const int32_t> key) {
    if (contains(block)) broken(block, "is entered twice");
    if (parent != kNone && !contains(parent)) broken(block, "is entered below one that is not in the tree");
    if (key.size() != kBlockTokens)
        broken(block, "is entered with " + std::to_string(key.size()) + " tokens");
    if (const Found found = find(parent, salt, key); found.tokens == kBlockTokens) {
        broken(block, "has the tokens of its sibling " + std::to_string(found.block));
    }
    int32_t* link = &children_of(parent);
    while (*link != kNone && above(*link, block)) {
        const Order order = compare(salt, key, *link);
        link = order.sign < 0 ? &node(*link).left : &node(*link).right;
    }
    Node& made = node(block);
    int32_t rest = *link;
    *link = block;
    // What hung here goes to the left or the right of the new node, piece by piece.
    int32_t* before = &made.left;
    int32_t* after = &made.right;
    while (rest != kNone) {
        const Order order = compare(salt, key, rest);
        int32_t*& side = order.sign < 0 ? after : before;
        *side = rest;
        side = order.sign < 0 ? &node(rest).left : &node(rest).right;
        rest = *side;
    }
    *before = *after = kNone;
    made.parent = parent;
    made.children = kNone;
    std::copy(key.begin(), key.end(), made.tokens.begin());
    salts_[static_cast<size_t>(block)] = salt;
    ++size_;
}

void PrefixTree::remove(int32_t leaf) {
    if (!contains(leaf) || !is_leaf(leaf)) broken(leaf, "is to be removed and is no leaf");
    Node& gone = node(leaf);
    int32_t* link = &children_of(gone.parent);
    while (*link != leaf) {
        if (*link == kNone) broken(leaf, "is not among the children of its parent");
        const Order order = compare(salts_[static_cast<size_t>(leaf)], gone.tokens, *link);
        link = order.sign < 0 ? &node(*link).left : &node(*link).right;
    }
    int32_t left = gone.left;
    int32_t right = gone.right;
    while (left != kNone && right != kNone) {
        const bool take_left = above(left, right);
        *link = take_left ? left : right;
        link = take_left ? &node(left).right : &node(right).left;
        (take_left ? left : right) = *link;
    }
    *link = left != kNone ? left : right;
    gone = Node{};
    --size_;
}

int32_t PrefixTree::some_leaf(int32_t block) const {
    int32_t leaf = block == kNone ? first_blocks_ : block;
    while (leaf != kNone && !is_leaf(leaf)) leaf = node(leaf).children;
    return leaf;
}

int PrefixTree::count_treap(int32_t root, int32_t parent) const {
    // Depth-first by hand: a chain of blocks is as long as a context.
    std::vector<int32_t> open{root};
    int count = 0;
    while (!open.empty()) {
        const int32_t block = open.back();
        open.pop_back();
        if (block == kNone) continue;
        if (++count > size_) broken(block, "is in a loop");
        if (node(block).parent != parent) broken(block, "has another parent than the children around it");
        for (const int32_t child : {node(block).left, node(block).right}) {
            if (child == kNone) continue;
            if (!above(block, child)) broken(block, "is out of order in its treap");
            const bool left = child == node(block).left;
            const Order order = compare(salts_[static_cast<size_t>(child)], node(child).tokens, block);
            if (order.sign != (left ? -1 : 1)) broken(block, "is out of order among its siblings");
            open.push_back(child);
        }
    }
    return count;
}

void PrefixTree::check_integrity() const {
    int reached = count_treap(first_blocks_, kNone);
    int present = 0;
    for (int32_t block = 0; block < static_cast<int32_t>(nodes_.size()); ++block) {
        if (!contains(block)) continue;
        ++present;
        if (parent(block) != kNone && !contains(parent(block))) broken(block, "hangs below a missing one");
        reached += count_treap(node(block).children, block);
    }
    if (present != size_ || reached != size_) {
        throw std::logic_error("the prefix tree counts " + std::to_string(size_) + " KV blocks, holds " +
                               std::to_string(present) + " and reaches " + std::to_string(reached));
    }
}

}  // namespace castiron
