// What is left of an engine and its requests when the device fails, vanishes or hangs.
#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/engine_support.h"

using namespace castiron;
using namespace castiron::testing;
using namespace std::chrono_literals;

TEST_CASE("a failing step ends the running requests with the reason, and the engine goes on") {
    Bench bench({2, 64, 2, 200});
    bench.device->held_from = 3;
    const std::vector<int32_t> prompt = {5, 6};
    Outcomes outcomes;
    const RequestId first = bench.engine->submit(prompt, greedy(100));
    while (outcomes[first].tokens.empty()) take(*bench.engine, outcomes, 1s);
    bench.device->failures = 1;
    bench.device->held_from = FakeDevice::kNever;
    finish_all(*bench.engine, outcomes, 1);
    CHECK(outcomes[first].reason == FinishReason::kError);
    CHECK(outcomes[first].error == "the device failed: the fake device was told to fail");
    const RequestId second = bench.engine->submit(prompt, greedy(5));
    finish_all(*bench.engine, outcomes, 2);
    CHECK(outcomes[second].tokens == alone(prompt, greedy(5), 200).tokens);
    const EngineStats stats = idle_stats(*bench.engine);
    CHECK(stats.kv_blocks_used == 0);
    CHECK(stats.device_failures == 1);
    CHECK(stats.dead.empty());
}

TEST_CASE("a device that keeps failing makes the engine dead, and submit says so") {
    Bench bench({1, 64, 1, 200});
    bench.device->failures = 1000;
    const std::vector<int32_t> prompt = {5, 6};
    Outcomes outcomes;
    size_t sent = 0;
    try {
        for (; sent < 1000; ++sent) {
            bench.engine->submit(prompt, greedy(5));
            std::this_thread::sleep_for(1ms);
        }
    } catch (const EngineDeadError& error) {
        CHECK(std::string(error.what()).find("the fake device was told to fail (3 times in a row)") !=
              std::string::npos);
    }
    CHECK(sent < 1000);
    finish_all(*bench.engine, outcomes, sent);
    for (const auto& [id, outcome] : outcomes) CHECK(outcome.reason == FinishReason::kError);
    const EngineStats stats = bench.engine->stats(0);
    CHECK_FALSE(stats.dead.empty());
    CHECK(stats.running == 0);
    CHECK(stats.kv_blocks_used == 0);
    CHECK(bench.engine->poll(10s).empty());  // at once
}

TEST_CASE("a lost device makes the engine dead at once: running and waiting requests end with the reason") {
    Bench bench({1, 64, 1, 4000});
    bench.device->held_from = 3;
    const std::vector<int32_t> prompt = {5, 6};
    const RequestId running = bench.engine->submit(prompt, greedy(3000));
    bench.engine->submit(prompt, greedy(3000));
    Outcomes outcomes;
    while (outcomes[running].tokens.empty()) take(*bench.engine, outcomes, 1s);
    bench.device->lost = true;
    bench.device->held_from = FakeDevice::kNever;
    finish_all(*bench.engine, outcomes, 2);
    for (const auto& [id, outcome] : outcomes) {
        CHECK(outcome.reason == FinishReason::kError);
        CHECK(outcome.error == "the device is lost: the fake device was told to vanish");
    }
    CHECK_THROWS_WITH_AS(static_cast<void>(bench.engine->submit(prompt, greedy(1))),
                         "the engine is dead: the device is lost: the fake device was told to vanish",
                         EngineDeadError);
}

TEST_CASE("a step that hangs ends every request with the reason, and what the engine was doing is kept") {
    const Limits limits{2, 32, 2, 100};
    EngineOptions options;
    options.watchdog_seconds = 0.2;
    Bench bench(limits, options);
    Outcomes outcomes;
    const RequestId first = bench.engine->submit(std::vector<int32_t>{1, 2, 3}, greedy(5));
    finish_all(*bench.engine, outcomes, 1);
    CHECK(outcomes[first].reason == FinishReason::kLength);
    bench.device->held_from = 0;
    for (int i = 0; i < 3; ++i) bench.engine->submit(std::vector<int32_t>{1, 2, i}, greedy(50));
    finish_all(*bench.engine, outcomes, 4);
    outcomes.erase(first);
    for (const auto& [id, outcome] : outcomes) {
        CHECK(outcome.reason == FinishReason::kError);
        CHECK(outcome.error.find("has been on the device for") != std::string::npos);
    }
    CHECK_THROWS_AS(bench.engine->submit(std::vector<int32_t>{1}, greedy(1)), EngineDeadError);
    const EngineStats stats = bench.engine->stats(0);
    CHECK(stats.dead.find("watchdog_timeout is 0.2") != std::string::npos);
    CHECK(stats.stall_report.find("KV blocks: ") != std::string::npos);
    CHECK(stats.stall_report.find("prompt tokens, 0 generated") != std::string::npos);
    CHECK(stats.running == 0);
    CHECK_FALSE(bench.engine->shutdown());
    bench.device->held_from = FakeDevice::kNever;
}

TEST_CASE("a slow device is not taken for one that hangs") {
    const Limits limits{2, 32, 2, 100};
    EngineOptions options;
    options.watchdog_seconds = 2;
    Bench bench(limits, options);
    bench.device->delay = 30ms;
    Outcomes outcomes;
    const RequestId id = bench.engine->submit(std::vector<int32_t>{1, 2, 3}, greedy(80));
    finish_all(*bench.engine, outcomes, 1);
    CHECK(outcomes[id].reason == FinishReason::kLength);
    CHECK(bench.engine->stats(0).stall_report.empty());
    CHECK(bench.engine->shutdown());
}

TEST_CASE("logits that are not finite end their request alone") {
    for (const bool on_device : {false, true}) {
        Bench bench({4, 64, 4, 200}, {}, on_device);
        const std::vector<int32_t> poisoned = {1, 2, 3};
        const std::vector<int32_t> healthy = {1, 2, 4};
        bench.device->poisoned_history = poisoned;
        Outcomes outcomes;
        const RequestId bad = bench.engine->submit(poisoned, greedy(5));
        const RequestId good = bench.engine->submit(healthy, greedy(5));
        finish_all(*bench.engine, outcomes, 2);
        CHECK(outcomes[bad].reason == FinishReason::kError);
        CHECK(outcomes[bad].error.find("not finite (NaN or infinity) at position 2") != std::string::npos);
        CHECK(outcomes[good].tokens == alone(healthy, greedy(5), 200).tokens);
    }
}
