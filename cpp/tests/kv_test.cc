#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "kv/block_pool.h"
#include "kv/block_table.h"
#include "kv/pool_size.h"

using namespace castiron;

TEST_CASE("a promise sets blocks aside for one sequence alone") {
    BlockPool pool(4);
    REQUIRE(pool.promise(3));
    CHECK_FALSE(pool.promise(2));
    CHECK(pool.free() == 4);
    const int32_t block = pool.take_promised();
    CHECK(pool.free() == 3);
    CHECK(pool.promised() == 2);
    CHECK(pool.references(block) == 1);
    pool.withdraw(2);
    pool.release(block);
    CHECK(pool.free() == 4);
    pool.check_integrity();
}

TEST_CASE("a shared block is free only after its last holder let go") {
    BlockPool pool(2);
    REQUIRE(pool.promise(1));
    const int32_t block = pool.take_promised();
    pool.retain(block);
    pool.release(block);
    CHECK(pool.used() == 1);
    pool.release(block);
    CHECK(pool.used() == 0);
    pool.check_integrity();
}

TEST_CASE("misuse of the pool is an error, not a corruption") {
    CHECK_THROWS_AS(BlockPool(0), std::invalid_argument);
    BlockPool pool(2);
    CHECK_THROWS_AS(static_cast<void>(pool.take_promised()), std::logic_error);
    CHECK_THROWS_AS(pool.release(0), std::logic_error);
    CHECK_THROWS_AS(pool.retain(1), std::logic_error);
    CHECK_THROWS_AS(pool.release(2), std::logic_error);
    CHECK_THROWS_AS(pool.release(-1), std::logic_error);
    CHECK_THROWS_AS(pool.withdraw(1), std::logic_error);
    pool.check_integrity();
}

TEST_CASE("a block table grows by promised blocks and gives everything back") {
    BlockPool pool(4);
    BlockTable table(70);  // 32 + 32 + 6 tokens
    CHECK(table.max_blocks() == 3);
    REQUIRE(table.reserve(pool, 70));
    table.grow(pool, 1);
    CHECK(table.blocks().size() == 1);
    table.grow(pool, 32);
    CHECK(table.blocks().size() == 1);
    table.grow(pool, 33);
    CHECK(table.blocks().size() == 2);
    CHECK(pool.promised() == 1);
    CHECK_THROWS_AS(table.grow(pool, 97), std::logic_error);
    CHECK_THROWS_AS(static_cast<void>(table.reserve(pool, 97)), std::logic_error);
    BlockTable other(64);
    CHECK_FALSE(other.reserve(pool, 64));
    table.close(pool);
    table.close(pool);
    CHECK(pool.free() == 4);
    CHECK(pool.promised() == 0);
    CHECK(other.reserve(pool, 64));
    other.close(pool);
    pool.check_integrity();
}

TEST_CASE("block accounting stays exact through random lives") {
    for (uint32_t seed = 0; seed < 200; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        BlockPool pool(1 + static_cast<int>(random() % 20));
        std::vector<std::unique_ptr<BlockTable>> open;
        std::vector<int> lengths;
        std::vector<int> limits;
        for (int turn = 0; turn < 200; ++turn) {
            if (random() % 3 == 0) {
                const int tokens = 1 + static_cast<int>(random() % 200);
                auto table = std::make_unique<BlockTable>(tokens);
                const int available = pool.free() - pool.promised();
                const bool fits = table->reserve(pool, tokens);
                CHECK(fits == (blocks_for_tokens(tokens) <= available));
                if (!fits) continue;
                open.push_back(std::move(table));
                lengths.push_back(0);
                limits.push_back(tokens);
            } else if (!open.empty()) {
                const size_t i = random() % open.size();
                if (lengths[i] == limits[i] || random() % 8 == 0) {
                    open[i]->close(pool);
                    open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
                    lengths.erase(lengths.begin() + static_cast<std::ptrdiff_t>(i));
                    limits.erase(limits.begin() + static_cast<std::ptrdiff_t>(i));
                } else {
                    lengths[i] = std::min(limits[i], lengths[i] + 1 + static_cast<int>(random() % 40));
                    open[i]->grow(pool, lengths[i]);
                }
            }
            pool.check_integrity();
            int held = 0;
            int promised = 0;
            for (size_t i = 0; i < open.size(); ++i) {
                held += blocks_for_tokens(lengths[i]);
                promised += blocks_for_tokens(limits[i]) - blocks_for_tokens(lengths[i]);
            }
            CHECK(pool.used() == held);
            CHECK(pool.promised() == promised);
        }
        for (auto& table : open) table->close(pool);
        CHECK(pool.used() == 0);
        CHECK(pool.promised() == 0);
    }
}

TEST_CASE("the pool's size follows the option, else the limits, else the memory") {
    const Limits limits{8, 512, 8, 1000};  // 32 blocks a sequence
    const uint64_t mib = uint64_t{1} << 20;
    const KvShape shape{mib, 0, {}};
    CHECK(choose_pool_size({7, 0}, limits, shape, 7 * mib, mib).blocks == 7);
    CHECK_THROWS_WITH_AS(static_cast<void>(choose_pool_size({8, 0}, limits, shape, 7 * mib, mib)),
                         "kv_cache_blocks is 8, which takes 8 MiB; 7 MiB are available: choose at most 7",
                         std::invalid_argument);
    CHECK(choose_pool_size({}, limits, shape, 2000 * mib, 500 * mib).blocks == 256);
    CHECK(choose_pool_size({}, limits, shape, 2000 * mib, 500 * mib).limited_by == "limits");
    CHECK(choose_pool_size({}, limits, shape, 400 * mib, 100 * mib).blocks == 100);
    CHECK(choose_pool_size({}, limits, shape, 400 * mib, 100 * mib).limited_by == "memory");
    CHECK(choose_pool_size({}, limits, shape, 0, 0).blocks == 1);
    CHECK(available_memory() > 0);
}
