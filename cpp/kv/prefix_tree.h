// Which cached block continues which: finds the longest cached prefix of a sequence.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"
#include "kv/cache_key.h"

namespace castiron {

// A tree whose nodes are blocks of the KV pool, named by their index. The path to a node spells the tokens
// before it, the node holds kBlockTokens more; keys and values of a token depend on all tokens before it, so
// a block may be used by exactly the sequences that begin with its path. First blocks belong to a salt.
//
// The children of a node are kept in the order of their tokens, in a treap: one descent finds the child that
// has the most tokens in common with a sequence, in O(log children) comparisons. All memory is taken by the
// constructor. Holds no counts of users: BlockPool does.
class PrefixTree {
public:
    static constexpr int32_t kNone = -1;

    struct Found {
        int32_t block = kNone;
        int tokens = 0;  // leading tokens in common; kBlockTokens: the whole block
    };

    explicit PrefixTree(int num_blocks);

    // Of the children of `parent` (kNone: of the first blocks of `salt`), the one with the most leading
    // tokens in common with `tokens`; kNone where no child shares a token.
    [[nodiscard]] Found find(int32_t parent, const CacheSalt& salt, std::span<const int32_t> tokens) const;
    // Enters a block of kBlockTokens tokens. Throws std::logic_error when it is in the tree, `parent` is not,
    // or the parent has a child of the same tokens.
    void insert(int32_t block, int32_t parent, const CacheSalt& salt, std::span<const int32_t> tokens);
    // Takes a node without children out.
    void remove(int32_t leaf);

    [[nodiscard]] bool contains(int32_t block) const { return node(block).parent != kAbsent; }
    [[nodiscard]] int32_t parent(int32_t block) const { return node(block).parent; }
    [[nodiscard]] bool is_leaf(int32_t block) const { return node(block).children == kNone; }
    // Any node below `block` (kNone: of the whole tree) that has no children; `block` itself if it has none.
    [[nodiscard]] int32_t some_leaf(int32_t block) const;
    [[nodiscard]] int size() const { return size_; }
    // Throws std::logic_error that says what is wrong.
    void check_integrity() const;

private:
    static constexpr int32_t kAbsent = -2;

    struct Node {
        int32_t parent = kAbsent;
        int32_t children = kNone;  // root of the treap of its children
        int32_t left = kNone;      // in the treap that it is in
        int32_t right = kNone;
        std::array<int32_t, kBlockTokens> tokens{};
    };
    // -1, 0 or 1 as the key lies before, at or after the node, and the leading tokens in common.
    struct Order {
        int sign = 0;
        int common = 0;
    };

    [[nodiscard]] const Node& node(int32_t block) const { return nodes_[static_cast<size_t>(block)]; }
    [[nodiscard]] Node& node(int32_t block) { return nodes_[static_cast<size_t>(block)]; }
    [[nodiscard]] Order compare(const CacheSalt& salt, std::span<const int32_t> key, int32_t block) const;
    [[nodiscard]] int32_t& children_of(int32_t parent) {
        return parent == kNone ? first_blocks_ : node(parent).children;
    }
    int count_treap(int32_t root, int32_t parent) const;

    std::vector<Node> nodes_;
    std::vector<CacheSalt> salts_;  // of the first blocks
    int32_t first_blocks_ = kNone;
    int size_ = 0;
};

}  // namespace castiron
