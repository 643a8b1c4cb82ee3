// What a model of which some layers have a window gives back while a request runs, and finds again.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "kv/block_pool.h"
#include "kv/block_table.h"
#include "kv/pool_size.h"
#include "tests/kv_window_support.h"

using namespace castiron;
using namespace castiron::testing;

namespace {

constexpr KvWindow kWindow{64, 32, true};
constexpr CacheUse kCached{true, 0, {}};

// Computes the tokens from `computed` on, 32 at a time.
void compute(BlockTable& table, BlockPool& pool, std::span<const int32_t> tokens, int computed = 0) {
    REQUIRE(table.reserve(pool, static_cast<int64_t>(tokens.size())));
    for (const int end = static_cast<int>(tokens.size()); computed < end;) {
        const int next = std::min(computed + 32, end);
        table.slide(pool, computed);
        table.grow(pool, next);
        table.keep(pool, tokens, next);
        pool.check_integrity();
        computed = next;
    }
}

}  // namespace

TEST_CASE("a sequence keeps its blocks and reads the window blocks of its window") {
    CHECK(kWindow.most_window_blocks(100) == 4);  // 64 positions, and the token behind them, touch so many
    CHECK(kWindow.most_window_blocks(3) == 3);
    BlockPool pool(30, 6, 1);
    BlockTable table(960, {}, kWindow);
    REQUIRE(table.reserve(pool, 960));
    CHECK(table.num_blocks() == 30);
    CHECK(pool.windows()->promised() == 4);
    for (int computed = 0; computed < 960; computed += 32) {
        table.slide(pool, computed);
        table.grow(pool, computed + 32);
        const WindowTable& windows = table.windows();
        CHECK(pool.used() == computed / 32 + 1);
        // The token behind `computed` sees the one 63 before it.
        CHECK(windows.first() == std::max(computed - 63, 0) / 32);
        CHECK(pool.windows()->used() == computed / 32 + 1 - windows.first());
        for (int place = 0; place < windows.first(); ++place) {
            CHECK(windows.blocks()[static_cast<size_t>(place)] ==
                  windows.blocks()[static_cast<size_t>(windows.first())]);
        }
        pool.check_integrity();
    }
    table.close(pool);
    pool.check_integrity();
    CHECK(pool.windows()->free() == 6);
    CHECK(pool.windows()->promised() == 0);
}

TEST_CASE("what sequences read is promised to each, and no more than there is") {
    BlockPool pool(100, 9, 1);
    BlockTable first(960, {}, kWindow), second(960, {}, kWindow), third(64, {}, kWindow);
    REQUIRE(first.reserve(pool, 960));
    REQUIRE(second.reserve(pool, 960));
    CHECK(pool.windows()->available() == 0);
    CHECK_FALSE(third.reserve(pool, 64));
    CHECK(pool.promised() == 60);
    CHECK(pool.windows()->promised() == 8);
    first.close(pool);
    CHECK(third.reserve(pool, 64));
    CHECK(pool.windows()->promised() == 6);
    for (BlockTable* table : {&second, &third}) table->close(pool);
    pool.check_integrity();
}

TEST_CASE("a sequence goes on from the last place whose window is there") {
    const auto tokens = counting(321);
    BlockPool pool(40, 12, 1);
    BlockTable first(321, kCached, kWindow);
    compute(first, pool, std::span(tokens).first(320));
    first.close(pool);
    CHECK(pool.windows()->cached() == 10);
    std::optional<BlockCopy> copy;
    SUBCASE("all of it") {
        BlockTable second(321, kCached, kWindow);
        CHECK(second.reuse(pool, tokens, 0, copy) == 320);
        CHECK(second.windows().first() == (320 - 63) / 32);
        CHECK(pool.windows()->used() == 2);
        second.close(pool);
    }
    SUBCASE("one that ends earlier") {
        BlockTable second(321, kCached, kWindow);
        CHECK(second.reuse(pool, std::span(tokens).first(130), 0, copy) == 128);
        REQUIRE(second.reserve(pool, 131));
        CHECK(second.reuse(pool, std::span(tokens).first(130), 128, copy) == 130);  // by way of a copy
        REQUIRE(copy);
        CHECK(pool.window_of(copy->from) != WindowPool::kNone);
        CHECK(pool.windows()->readers(copy->to) == 1);
        second.close(pool);
    }
    SUBCASE("others took the window blocks that were used first") {
        BlockTable other(200, {}, kWindow);
        auto strange = tokens;
        strange[0] = 60;
        compute(other, pool, std::span(strange).first(200));
        other.close(pool);
        CHECK(pool.windows()->evictions() == 1);  // two of twelve were free, and three are read at a time
        BlockTable second(321, kCached, kWindow);
        CHECK(second.reuse(pool, std::span(tokens).first(65), 0, copy) == 0);  // its window is gone
        CHECK(second.num_cached() == 0);
        CHECK(second.reuse(pool, std::span(tokens).first(321), 0, copy) == 320);
        second.close(pool);
    }
    pool.check_integrity();
    CHECK(pool.windows()->used() == 0);
}

TEST_CASE("a block that is computed again gives its window block to the one in the cache") {
    const auto tokens = counting(96);
    BlockPool pool(20, 5, 1);
    BlockTable first(96, kCached, kWindow);
    compute(first, pool, tokens);
    const int32_t block = first.blocks()[0];
    first.close(pool);
    BlockTable other(160, {}, kWindow);
    REQUIRE(other.reserve(pool, 160));
    other.grow(pool, 160);  // all five
    CHECK(pool.window_of(block) == WindowPool::kNone);
    other.close(pool);
    BlockTable second(96, kCached, kWindow);
    std::optional<BlockCopy> copy;
    CHECK(second.reuse(pool, std::span(tokens).first(95), 0, copy) == 0);
    compute(second, pool, tokens);
    CHECK(second.blocks()[0] == block);
    CHECK(pool.window_of(block) == second.windows().blocks()[0]);
    CHECK(pool.windows()->readers(block) == 1);
    CHECK(pool.used() == 3);
    second.close(pool);
    pool.check_integrity();
}

TEST_CASE("a cached window block goes to the host tier and comes back without its block") {
    const auto tokens = counting(97);
    std::vector<std::byte> memory(20);
    HostTier blocks(memory.data(), 10, 1), windows(memory.data() + 10, 10, 1, nullptr, KvGroup::kWindow);
    BlockPool pool(20, 5, 1);
    pool.use_tiers({&blocks, &windows});
    BlockTable first(97, kCached, kWindow);
    compute(first, pool, std::span(tokens).first(96));
    first.close(pool);
    BlockTable other(160, {}, kWindow);
    REQUIRE(other.reserve(pool, 160));
    other.grow(pool, 160);  // all five
    other.close(pool);
    std::vector<BlockMove> moves;
    pool.take_moves(moves);
    CHECK(blocks.saved() == 0);
    CHECK(windows.saved() == 3);
    pool.tiers().each([&](HostTier& tier) { tier.settle(moves); });
    BlockTable second(97, kCached, kWindow);
    std::optional<BlockCopy> copy;
    CHECK(second.reuse(pool, std::span(tokens).first(64), 0, copy) == 64);
    moves.clear();
    pool.take_moves(moves);
    REQUIRE(moves.size() == 2);
    for (const BlockMove& move : moves) {
        CHECK(move.kind == BlockMove::Kind::kLoad);
        CHECK(move.group == KvGroup::kWindow);
    }
    CHECK(windows.loaded() == 2);
    CHECK(blocks.loaded() == 0);
    pool.tiers().each([&](HostTier& tier) { tier.settle(moves); });
    second.close(pool);
    pool.check_integrity();
}

TEST_CASE("a memory is divided by what requests of full length read, and blocks get the rest") {
    const uint64_t mib = uint64_t{1} << 20;
    // Gemma 3 27B's proportions: 10 layers that see everything, 52 with a window of 1,024 tokens.
    const KvShape shape{10 * mib, 52 * mib, {1024, 0, true}};
    const Limits limits{8, 2048, 8, 131072};
    const uint64_t memory = 62 * 1000 * mib;
    const PoolSize size = choose_pool_size({}, limits, shape, memory, memory);
    // 34 of each of 8 requests, 64 for the chunks of a step, an eighth of the thousand blocks that it held.
    CHECK(size.window_blocks == 8 * 34 + 64 + 125);
    CHECK(size.set_aside == 64);
    CHECK(size.blocks == (62 * 1000 - 52 * 461) / 10);
    CHECK(bytes_of(size, shape) <= memory);
    SUBCASE("more requests than it is for do not take it all") {
        const PoolSize many = choose_pool_size({}, {256, 2048, 256, 131072}, shape, memory, memory);
        CHECK(many.window_blocks == 500);
    }
    SUBCASE("no more blocks than the limits can use") {
        const PoolSize few = choose_pool_size({}, {1, 2048, 1, 8192}, shape, memory, memory);
        CHECK(few.blocks == 256);
        CHECK(few.window_blocks == 34 + 64 + 32);
        CHECK(few.limited_by == "limits");
    }
    SUBCASE("where requests are shorter than the window nothing is kept apart") {
        const PoolSize none = choose_pool_size({}, {8, 2048, 8, 1024}, shape, memory, memory);
        CHECK(none.blocks == 256);
        CHECK(none.window_blocks == 0);
        CHECK(bytes_of(none, shape) == 256 * 62 * mib);
    }
    SUBCASE("a wish for bytes, and one for blocks") {
        CHECK(choose_pool_size({0, memory}, limits, shape, memory, 0).blocks == size.blocks);
        const PoolSize wished = choose_pool_size({2000, 0}, limits, shape, memory, 0);
        CHECK(wished.window_blocks == 8 * 34 + 64 + 250);
        CHECK_THROWS_WITH_AS(static_cast<void>(choose_pool_size({3500, 0}, limits, shape, memory, 0)),
                             "kv_cache_blocks is 3500, which takes 75196 MiB; 62000 MiB are available: "
                             "choose at most 2700",
                             std::invalid_argument);
        CHECK_THROWS_WITH_AS(static_cast<void>(choose_pool_size({0, mib}, limits, shape, memory, 0)),
                             "kv_cache_memory is 1048576 bytes; one block of 32 tokens takes 65011712",
                             std::invalid_argument);
    }
}

TEST_CASE("long outputs take no more window blocks than their windows, and say what they say with all") {
    const Limits limits{4, 64, 4, 2000};
    for (const bool on_device : {false, true}) {
        auto owned = std::make_unique<FakeDevice>(limits, kVocab, on_device, on_device);
        owned->window = 100;
        owned->window_of_some = true;
        Engine engine(std::move(owned), limits, kVocab, {});
        const EngineStats start = engine.stats(0);
        CHECK(start.kv_blocks_total == 4 * 63);
        CHECK(start.window_blocks_total == 4 * 6 + 2 + 31);
        const EngineStats stats = say_long_outputs(engine);
        CHECK(stats.window_blocks_evicted > 0);
        CHECK(stats.window_blocks_used + stats.window_blocks_promised == 0);
        CHECK(stats.window_blocks_cached + stats.window_blocks_free == stats.window_blocks_total);
    }
}
