// What a model whose every layer slides gives back while a request runs.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kv/block_pool.h"
#include "kv/block_table.h"
#include "program/sliding_window.h"
#include "tests/kv_window_support.h"

using namespace castiron;
using namespace castiron::testing;

namespace {

// One layer of the cache, read with this window and chunk.
Program reading(int64_t window, int64_t chunk) {
    Program program;
    program.limits.max_seq_len = 1000;
    program.kv_layers.emplace_back();
    Step step;
    step.kernel = "paged_attention";
    step.attrs = {{"layer", int64_t{0}}, {"window", window}, {"chunk", chunk}};
    program.steps.push_back(step);
    return program;
}

}  // namespace

TEST_CASE("a program slides as far as the longest window of its layers, if each of them has one") {
    CHECK(sliding_window(reading(0, 0)) == 0);
    CHECK(sliding_window(reading(100, 0)) == 100);
    CHECK(sliding_window(reading(0, 64)) == 64);
    CHECK(sliding_window(reading(100, 64)) == 64);
    CHECK(sliding_window(reading(1000, 0)) == 0);  // no sequence is longer
    Program mixed = reading(100, 0);
    mixed.kv_layers.emplace_back();
    CHECK(sliding_window(mixed) == 0);  // nobody says how the second layer is read
    Step step = mixed.steps[0];
    step.attrs["layer"] = int64_t{1};
    step.attrs["window"] = int64_t{300};
    mixed.steps.push_back(step);
    CHECK(sliding_window(mixed) == 300);
    mixed.steps.back().attrs["window"] = int64_t{0};
    CHECK(sliding_window(mixed) == 0);
    Program plugin = reading(100, 0);
    Step unknown;
    unknown.kernel = "their_attention";
    unknown.launches.emplace_back();
    unknown.launches[0].args.push_back({Arg::Kind::kKCache, 0, 0});
    plugin.steps.push_back(unknown);
    CHECK(sliding_window(plugin) == 0);
}

TEST_CASE("a layer's window is its attention's, or longer") {
    Program mixed = reading(100, 0);
    mixed.kv_layers.emplace_back();
    CHECK(layer_window(mixed) == 0);
    mixed.kv_layers[0].window = 100;
    CHECK(layer_window(mixed) == 100);
    mixed.kv_layers[0].window = 99;
    CHECK_THROWS_WITH_AS(static_cast<void>(layer_window(mixed)),
                         "KV layer 0 has a window of 99 tokens, and its attention sees 100",
                         std::invalid_argument);
    mixed.steps[0].attrs["window"] = int64_t{0};
    CHECK_THROWS_WITH_AS(static_cast<void>(layer_window(mixed)),
                         "KV layer 0 has a window of 99 tokens, and its attention sees everything",
                         std::invalid_argument);
}

TEST_CASE("a sequence holds its window and a chunk, and the promise moves on with it") {
    BlockPool pool(6);
    // 64 tokens are seen and 32 fed at a time: at most four blocks at once, of thirty in all.
    BlockTable table(960, {}, {64, 32});
    REQUIRE(table.reserve(pool, 960));
    CHECK(table.num_blocks() == 4);
    for (int computed = 0; computed < 960; computed += 32) {
        table.slide(pool, computed);
        table.grow(pool, computed + 32);
        CHECK(table.num_blocks() <= 4);
        CHECK(pool.used() + pool.promised() == table.num_blocks());
        // The token behind `computed` sees the one 63 before it.
        CHECK(table.num_released() == std::max(computed - 63, 0) / 32);
        for (int place = 0; place < table.num_released(); ++place) {
            CHECK(table.blocks()[static_cast<size_t>(place)] == table.held()[0]);
        }
        pool.check_integrity();
    }
    table.close(pool);
    CHECK(pool.free() == 6);
    CHECK(pool.promised() == 0);
}

TEST_CASE("who lets blocks go that others hold gets others for them") {
    BlockPool pool(11);
    const auto tokens = counting(300);
    const CacheUse use{true, 0, {}};
    BlockTable slides(320, use, {64, 32});
    REQUIRE(slides.reserve(pool, 320));
    for (int computed = 0; computed < 96; computed += 32) {
        slides.grow(pool, computed + 32);
        slides.keep(pool, tokens, computed + 32);
    }
    // Three blocks of its beginning are held by one that keeps all it has: they count for both.
    BlockTable keeps(100, use);
    std::optional<BlockCopy> copy;
    CHECK(keeps.reuse(pool, std::span(tokens).first(99), 0, copy) == 96);
    REQUIRE(keeps.reserve(pool, 100));
    CHECK(pool.available() == 11 - 4 - 4);
    BlockTable all_the_rest(96);
    REQUIRE(all_the_rest.reserve(pool, 96));
    CHECK(pool.available() == 0);
    for (int computed = 96; computed < 320; computed += 32) {
        slides.slide(pool, computed);
        slides.grow(pool, computed + 32);
        pool.check_integrity();
    }
    CHECK(pool.references(keeps.blocks()[0]) == 1);
    for (BlockTable* table : {&slides, &keeps, &all_the_rest}) table->close(pool);
    pool.check_integrity();
    CHECK(pool.used() + pool.promised() == 0);
}

TEST_CASE("blocks behind a window stay in the cache while there is room, and are found there") {
    const auto tokens = counting(200);
    const CacheUse use{true, 0, {}};
    for (const int blocks : {20, 5}) {
        BlockPool pool(blocks);
        BlockTable first(200, use, {64, 32});
        REQUIRE(first.reserve(pool, 200));
        for (int computed = 0; computed < 192; computed += 32) {
            first.slide(pool, computed);
            first.grow(pool, computed + 32);
            first.keep(pool, tokens, computed + 32);
            pool.check_integrity();
        }
        BlockTable second(200, use, {64, 32});
        std::optional<BlockCopy> copy;
        const int found = second.reuse(pool, tokens, 0, copy);
        if (blocks == 20) {
            CHECK(found == 192);
            CHECK(second.held().size() == 2);  // of positions 129 to 191, which the next token sees
        } else {
            CHECK(pool.evictions() > 0);  // with its blocks in use behind it, the beginning was given up
            CHECK(found == 0);
        }
        pool.check_integrity();
        first.close(pool);
        second.close(pool);
        CHECK(pool.used() == 0);
    }
}

TEST_CASE("a long output needs no more blocks than its window, and says what it says with all of them") {
    const Limits limits{4, 64, 4, 2000};
    for (const bool on_device : {false, true}) {
        auto owned = std::make_unique<FakeDevice>(limits, kVocab, on_device, on_device);
        owned->window = 100;
        EngineOptions options;
        options.kv_cache_blocks = 14;  // of 63 that one sequence of full length takes, of 4 such sequences
        Engine engine(std::move(owned), limits, kVocab, options);
        static_cast<void>(say_long_outputs(engine, 100));
    }
}
