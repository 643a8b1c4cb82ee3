#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "device/device.h"
#include "kv/block_pool.h"
#include "kv/block_table.h"
#include "kv/eviction_queue.h"
#include "kv/prefix_tree.h"

using namespace castiron;

namespace {

using Tokens = std::vector<int32_t>;

constexpr int32_t kNone = PrefixTree::kNone;

Tokens block_of(int32_t token) {
    return Tokens(kBlockTokens, token);
}

// A sequence that is computed in one go when the cache has given what it has; returns what it has.
int prefill(BlockPool& pool, BlockTable& table, const Tokens& tokens) {
    std::optional<BlockCopy> copy;
    const std::span<const int32_t> all(tokens);
    int cached = table.reuse(pool, all.first(all.size() - 1), 0, copy);
    REQUIRE(table.reserve(pool, static_cast<int64_t>(tokens.size())));
    cached = table.reuse(pool, all.first(all.size() - 1), cached, copy);
    table.grow(pool, static_cast<int64_t>(tokens.size()));
    table.keep(pool, tokens, static_cast<int>(tokens.size()));
    return cached;
}

}  // namespace

TEST_CASE("the tree finds the child that has the most leading tokens in common") {
    PrefixTree tree(8);
    const CacheSalt salt;
    Tokens a = block_of(1), b = block_of(1), c = block_of(1);
    b[20] = 2;
    c[5] = 0;
    tree.insert(0, kNone, salt, a);
    tree.insert(1, kNone, salt, b);
    tree.insert(2, kNone, salt, c);
    CHECK(tree.find(kNone, salt, b).block == 1);
    CHECK(tree.find(kNone, salt, b).tokens == kBlockTokens);
    Tokens wanted = b;
    wanted[29] = 9;
    CHECK(tree.find(kNone, salt, wanted).block == 1);
    CHECK(tree.find(kNone, salt, wanted).tokens == 29);
    CHECK(tree.find(kNone, salt, std::span(b).first(21)).block == 1);
    CHECK(tree.find(kNone, salt, std::span(b).first(21)).tokens == 21);
    CHECK(tree.find(kNone, salt, block_of(7)).block == kNone);
    CHECK(tree.find(kNone, {0, 1}, a).block == kNone);
    tree.insert(3, 1, salt, a);
    CHECK(tree.find(1, salt, a).block == 3);
    CHECK(tree.find(0, salt, a).block == kNone);
    CHECK_THROWS_AS(tree.remove(1), std::logic_error);
    CHECK_THROWS_AS(tree.insert(4, kNone, salt, a), std::logic_error);
    CHECK_THROWS_AS(tree.insert(3, kNone, salt, block_of(5)), std::logic_error);
    CHECK_THROWS_AS(tree.insert(4, 7, salt, a), std::logic_error);
    tree.remove(3);
    tree.remove(1);
    CHECK(tree.find(kNone, salt, wanted).tokens == 20);
    tree.check_integrity();
}

TEST_CASE("the tree agrees with a search through all of its paths") {
    for (uint32_t seed = 0; seed < 60; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        const int num_blocks = 1 + static_cast<int>(random() % 40);
        PrefixTree tree(num_blocks);
        std::map<int32_t, std::pair<int32_t, Tokens>> twin;  // block -> parent, tokens
        std::map<int32_t, CacheSalt> salts;                  // of first blocks
        const auto children = [&](int32_t of) {
            return std::count_if(twin.begin(), twin.end(),
                                 [&](const auto& n) { return n.second.first == of; });
        };
        const auto random_key = [&] {
            Tokens key = block_of(0);
            if (random() % 2 == 0) key[random() % kBlockTokens] = static_cast<int32_t>(random() % 4) - 1;
            if (random() % 2 == 0) key[random() % kBlockTokens] = static_cast<int32_t>(random() % 3);
            return key;
        };
        for (int turn = 0; turn < 300; ++turn) {
            int32_t parent = kNone;
            if (!twin.empty() && random() % 2 == 0) {
                parent = std::next(twin.begin(), static_cast<std::ptrdiff_t>(random() % twin.size()))->first;
            }
            const CacheSalt salt{random() % 2, random() % 2};
            const Tokens key = random_key();
            const size_t length = random() % 3 == 0 ? random() % kBlockTokens : kBlockTokens;
            int best = 0;
            for (const auto& [block, entry] : twin) {
                if (entry.first != parent || (parent == kNone && salts[block] != salt)) continue;
                const auto end = entry.second.begin() + static_cast<std::ptrdiff_t>(length);
                best = std::max(best,
                                static_cast<int>(std::mismatch(entry.second.begin(), end, key.begin()).first -
                                                 entry.second.begin()));
            }
            const auto found = tree.find(parent, salt, std::span(key).first(length));
            REQUIRE(found.tokens == best);
            REQUIRE((found.block == kNone) == (best == 0));
            if (best > 0) {
                const Tokens& other = twin.at(found.block).second;
                REQUIRE(twin.at(found.block).first == parent);
                REQUIRE(std::equal(other.begin(), other.begin() + best, key.begin()));
            }
            const auto block = static_cast<int32_t>(random() % static_cast<uint32_t>(num_blocks));
            if (!twin.contains(block) && length == kBlockTokens && best < kBlockTokens) {
                tree.insert(block, parent, salt, key);
                twin[block] = {parent, key};
                if (parent == kNone) salts[block] = salt;
            } else if (twin.contains(block) && children(block) == 0) {
                tree.remove(block);
                twin.erase(block);
            }
            for (const auto& [node, entry] : twin) {
                REQUIRE(tree.parent(node) == entry.first);
                REQUIRE(tree.is_leaf(node) == (children(node) == 0));
            }
            REQUIRE(tree.size() == static_cast<int>(twin.size()));
            tree.check_integrity();
        }
    }
}

TEST_CASE("eviction goes by priority, then by the last use, whatever was removed in between") {
    for (uint32_t seed = 0; seed < 100; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        EvictionQueue queue(30);
        std::set<std::tuple<int32_t, uint64_t, int32_t>> twin;  // -priority, last use, block
        for (uint64_t time = 0; time < 400; ++time) {
            const auto block = static_cast<int32_t>(random() % 30);
            const auto in_twin = std::find_if(twin.begin(), twin.end(),
                                              [&](const auto& entry) { return std::get<2>(entry) == block; });
            REQUIRE(queue.contains(block) == (in_twin != twin.end()));
            if (in_twin == twin.end()) {
                const int32_t priority = static_cast<int32_t>(random() % 3) - 1;
                queue.push(block, priority, time);
                twin.insert({-priority, time, block});
            } else if (random() % 2 == 0) {
                queue.remove(block);
                twin.erase(in_twin);
            } else {
                REQUIRE(queue.pop() == std::get<2>(*twin.begin()));
                twin.erase(twin.begin());
            }
            REQUIRE(queue.size() == static_cast<int>(twin.size()));
        }
    }
}

TEST_CASE("a sequence shares full blocks by reference and takes a part of the next by a copy") {
    BlockPool pool(10);
    Tokens tokens(80);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i);
    BlockTable first(100, {true, 0, {}});
    CHECK(prefill(pool, first, tokens) == 0);
    CHECK(first.num_cached() == 2);

    // While the first one still runs.
    Tokens other = tokens;
    other[50] = 99;
    BlockTable second(100, {true, 0, {}});
    std::optional<BlockCopy> copy;
    CHECK(second.reuse(pool, other, 0, copy) == 32);  // no promise, so no copy yet
    CHECK_FALSE(copy.has_value());
    REQUIRE(second.reserve(pool, 80));
    CHECK(second.reuse(pool, other, 32, copy) == 50);
    REQUIRE(copy.has_value());
    CHECK(copy->from == first.blocks()[1]);
    CHECK(copy->to == second.blocks()[1]);
    CHECK(second.blocks()[0] == first.blocks()[0]);
    CHECK(second.blocks()[1] != first.blocks()[1]);
    CHECK(pool.references(first.blocks()[0]) == 2);
    first.close(pool);
    CHECK(pool.used() == 2);
    CHECK(pool.cached() == 1);
    pool.check_integrity();
    second.close(pool);
    CHECK(pool.used() == 0);
    CHECK(pool.cached() == 2);
    CHECK(pool.free() == 8);
    pool.check_integrity();
}

TEST_CASE("tenants of different salts and sequences without the cache share nothing") {
    BlockPool pool(20);
    const Tokens tokens(70, 5);
    for (const CacheUse& use :
         {CacheUse{true, 0, {1, 2}}, CacheUse{true, 0, {2, 1}}, CacheUse{false, 0, {}}}) {
        BlockTable table(70, use);
        CHECK(prefill(pool, table, tokens) == 0);
        table.close(pool);
    }
    CHECK(pool.cached() == 4);  // the third left nothing behind
    BlockTable again(70, {true, 0, {2, 1}});
    CHECK(prefill(pool, again, tokens) == 64);
    again.close(pool);
    pool.check_integrity();
}

TEST_CASE("of two sequences that compute the same at the same time one gives its blocks back") {
    BlockPool pool(10);
    const Tokens tokens(70, 5);
    BlockTable a(70, {true, 0, {}}), b(70, {true, 0, {}});
    for (BlockTable* table : {&a, &b}) {
        REQUIRE(table->reserve(pool, 70));
        table->grow(pool, 70);
    }
    CHECK(pool.used() == 6);
    a.keep(pool, tokens, 70);
    b.keep(pool, tokens, 70);
    CHECK(pool.used() == 4);
    CHECK(a.blocks()[1] == b.blocks()[1]);
    CHECK(a.blocks()[2] != b.blocks()[2]);
    pool.check_integrity();
    a.close(pool);
    b.close(pool);
    CHECK(pool.used() == 0);
}

TEST_CASE(
    "blocks of low priority go first, of equal ones the least recently used, and no path loses its middle") {
    BlockPool pool(6);
    const auto run = [&](int32_t token, int32_t priority) {
        BlockTable table(65, {true, priority, {}});
        const int cached = prefill(pool, table, Tokens(65, token));
        table.close(pool);
        return cached;
    };
    CHECK(run(1, 0) == 0);
    CHECK(run(2, 5) == 0);  // 2 + 2 cached, 2 free
    CHECK(run(1, 0) == 64);
    CHECK(run(3, 0) == 0);  // takes the free ones and one of 2, whose second block goes
    CHECK(pool.evictions() == 1);
    CHECK(run(1, 0) == 64);
    CHECK(run(4, 0) == 0);
    CHECK(run(1, 0) == 64);
    CHECK(run(2, 5) == 0);
    CHECK(run(1, 0) == 64);
    pool.check_integrity();
}

TEST_CASE("what is promised cannot be taken away by a sequence that finds its blocks in the cache") {
    BlockPool pool(4);
    BlockTable old(65, {true, 0, {}});
    CHECK(prefill(pool, old, Tokens(65, 1)) == 0);
    old.close(pool);
    CHECK(pool.cached() == 2);
    BlockTable holder(128);
    REQUIRE(holder.reserve(pool, 128));  // the cached blocks are promised as well
    BlockTable late(65, {true, 0, {}});
    std::optional<BlockCopy> copy;
    CHECK(late.reuse(pool, Tokens(64, 1), 0, copy) == 0);
    CHECK_FALSE(late.reserve(pool, 65));
    holder.grow(pool, 128);
    CHECK(pool.evictions() == 2);
    pool.check_integrity();
    holder.close(pool);
}

TEST_CASE("a forgotten path is found by nobody and its holders go on") {
    BlockPool pool(10);
    const Tokens tokens(100, 5);
    BlockTable a(130, {true, 0, {}}), b(130, {true, 0, {}});
    CHECK(prefill(pool, a, tokens) == 0);
    CHECK(prefill(pool, b, tokens) == 96);
    a.forget(pool);
    pool.check_integrity();
    CHECK(pool.tree().size() == 0);
    Tokens longer(130, 5);
    b.grow(pool, 100);
    REQUIRE(b.reserve(pool, 130));
    b.grow(pool, 130);
    b.keep(pool, longer, 130);
    CHECK(pool.tree().size() == 0);
    a.close(pool);
    b.close(pool);
    CHECK(pool.free() == 10);
    pool.check_integrity();
}

// The twin: block contents as tokens, a list of what every sequence holds, and every path that was ever
// entered and not evicted, found by looking through all of them.
TEST_CASE("random sequences read their own tokens from shared blocks, and all accounts agree") {
    for (uint32_t seed = 0; seed < 250; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        const auto pick = [&](int low, int high) {
            return low + static_cast<int>(random() % static_cast<uint32_t>(high - low + 1));
        };
        BlockPool pool(pick(1, 24));
        std::vector<Tokens> contents(static_cast<size_t>(pool.total()), block_of(-1));
        struct Life {
            std::unique_ptr<BlockTable> table;
            Tokens tokens;
            int computed = 0;
        };
        std::vector<Life> lives;
        std::vector<Tokens> old{Tokens(150, 1)};
        for (int turn = 0; turn < 250; ++turn) {
            if (random() % 3 == 0) {
                Life life;
                life.tokens = old[random() % old.size()];
                life.tokens.resize(static_cast<size_t>(pick(1, std::min(150, 32 * pool.total()))), 1);
                if (random() % 2 == 0) life.tokens[random() % life.tokens.size()] = pick(0, 2);
                old.push_back(life.tokens);
                life.table =
                    std::make_unique<BlockTable>(static_cast<int64_t>(life.tokens.size()),
                                                 CacheUse{random() % 8 != 0, pick(0, 2), {random() % 2, 0}});
                const auto usable = std::span<const int32_t>(life.tokens).first(life.tokens.size() - 1);
                std::optional<BlockCopy> copy;
                life.computed = life.table->reuse(pool, usable, 0, copy);
                REQUIRE_FALSE(copy.has_value());
                if (life.table->reserve(pool, static_cast<int64_t>(life.tokens.size()))) {
                    lives.push_back(std::move(life));
                } else {
                    life.table->close(pool);
                }
            } else if (!lives.empty()) {
                const size_t i = random() % lives.size();
                Life& life = lives[i];
                const int length = static_cast<int>(life.tokens.size());
                if (life.computed == length || random() % 12 == 0) {
                    if (random() % 30 == 0) life.table->forget(pool);
                    life.table->close(pool);
                    lives.erase(lives.begin() + static_cast<std::ptrdiff_t>(i));
                } else {
                    std::optional<BlockCopy> copy;
                    const auto usable = std::span<const int32_t>(life.tokens).first(life.tokens.size() - 1);
                    life.computed = life.table->reuse(pool, usable, life.computed, copy);
                    if (copy)
                        contents[static_cast<size_t>(copy->to)] = contents[static_cast<size_t>(copy->from)];
                    const int to = std::min(length, life.computed + pick(1, 60));
                    life.table->grow(pool, to);
                    for (int p = life.computed; p < to; ++p) {
                        const auto block = life.table->blocks()[static_cast<size_t>(p / kBlockTokens)];
                        REQUIRE(pool.references(block) == 1);  // nobody else reads what is written
                        contents[static_cast<size_t>(block)][static_cast<size_t>(p % kBlockTokens)] =
                            life.tokens[static_cast<size_t>(p)];
                    }
                    life.computed = to;
                    life.table->keep(pool, life.tokens, to);
                }
            }
            pool.check_integrity();
            std::map<int32_t, int> held;
            int promised = 0;
            for (const Life& life : lives) {
                for (const int32_t block : life.table->blocks()) ++held[block];
                promised += life.table->num_blocks() - static_cast<int>(life.table->blocks().size());
                for (int p = 0; p < life.computed; ++p) {
                    const auto block = life.table->blocks()[static_cast<size_t>(p / kBlockTokens)];
                    REQUIRE(contents[static_cast<size_t>(block)][static_cast<size_t>(p % kBlockTokens)] ==
                            life.tokens[static_cast<size_t>(p)]);
                }
            }
            for (const auto& [block, count] : held) REQUIRE(pool.references(block) == count);
            REQUIRE(pool.used() == static_cast<int>(held.size()));
            REQUIRE(pool.promised() == promised);
            REQUIRE(pool.free() + pool.cached() + pool.used() == pool.total());
        }
        for (Life& life : lives) life.table->close(pool);
        REQUIRE(pool.used() == 0);
        REQUIRE(pool.promised() == 0);
        pool.forget_all();
        REQUIRE(pool.free() == pool.total());
        pool.check_integrity();
    }
}
