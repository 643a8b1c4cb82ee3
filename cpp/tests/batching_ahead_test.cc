// Steps that are started while the one before is on the device. Each test compares with the same requests on
// a device that runs one step at a time.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "batching/engine.h"
#include "tests/fake_device.h"

using namespace castiron;
using namespace std::chrono_literals;
using testing::FakeDevice;

namespace {

constexpr int kVocab = 31;
constexpr Limits kLimits{8, 64, 8, 160};

struct Said {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    FinishReason reason = FinishReason::kNone;
    int32_t stop_token = -1;
    std::string error;
    bool finished = false;
};

struct Bench {
    explicit Bench(bool queues, EngineOptions options = {}) {
        auto owned = std::make_unique<FakeDevice>(kLimits, kVocab, true, queues);
        device = owned.get();
        engine = std::make_unique<Engine>(std::move(owned), kLimits, kVocab, options);
    }

    // Polls until every request that was ever seen or is in `ids` has ended.
    void finish(const std::vector<RequestId>& ids) {
        const auto deadline = std::chrono::steady_clock::now() + 60s;
        const auto ended = [&](RequestId id) { return said[id].finished; };
        while (!std::all_of(ids.begin(), ids.end(), ended)) {
            REQUIRE(std::chrono::steady_clock::now() < deadline);
            poll();
        }
    }
    void poll() {
        for (const Event& event : engine->poll(50ms)) {
            Said& one = said[event.request_id];
            CHECK_FALSE(one.finished);
            one.tokens.insert(one.tokens.end(), event.token_ids.begin(), event.token_ids.end());
            for (const TokenLogprobs& entry : event.logprobs) one.logprobs.push_back(entry.logprob);
            one.reason = event.finish_reason;
            one.stop_token = event.stop_token_id;
            one.error = event.error;
            one.finished = event.finished;
        }
    }

    FakeDevice* device;
    std::unique_ptr<Engine> engine;
    std::map<RequestId, Said> said;
};

SamplingParams make_params(int max_tokens) {
    SamplingParams params;
    params.temperature = 0;
    params.max_tokens = max_tokens;
    params.seed = 7;
    return params;
}

}  // namespace

TEST_CASE("steps started ahead give every request the tokens that it gets one step at a time") {
    std::mt19937 random(20261130);
    struct Asked {
        std::vector<int32_t> prompt;
        SamplingParams params;
    };
    std::vector<Asked> asked;
    for (int i = 0; i < 60; ++i) {
        Asked one{std::vector<int32_t>(1 + random() % 90), make_params(1 + static_cast<int>(random() % 60))};
        for (int32_t& token : one.prompt) token = static_cast<int32_t>(random() % (i % 2 ? kVocab : 2));
        if (i % 3 == 0) one.params.stop_token_ids = {static_cast<int32_t>(random() % kVocab), 4};
        if (i % 4 == 0) one.params.temperature = 1.2F;
        if (i % 5 == 0) one.params.logprobs = 2;
        one.params.seed = i;
        asked.push_back(one);
    }
    std::map<RequestId, Said> said[2];
    for (const bool queues : {false, true}) {
        EngineOptions options;
        options.kv_cache_blocks = 24;  // fewer than eight of the requests want: blocks change hands
        Bench bench(queues, options);
        std::vector<RequestId> ids;
        for (const Asked& one : asked) ids.push_back(bench.engine->submit(one.prompt, one.params));
        bench.finish(ids);
        const EngineStats stats = bench.engine->stats(1024);
        if (queues) {
            CHECK(stats.ahead_steps > stats.steps / 2);
        } else {
            CHECK(stats.ahead_steps == 0);
        }
        for (const StepRecord& record : stats.recent_steps) {
            if (!record.ahead) CHECK(record.queued == 0);
            CHECK(record.device_sampled);
        }
        CHECK(stats.kv_blocks_used == 0);
        said[queues ? 1 : 0] = bench.said;
    }
    REQUIRE(said[0].size() == asked.size());
    int stopped = 0;
    for (const auto& [id, alone] : said[0]) {
        const Said& ahead = said[1].at(id);
        CHECK(ahead.tokens == alone.tokens);
        CHECK(ahead.logprobs == alone.logprobs);
        CHECK(ahead.reason == alone.reason);
        CHECK(ahead.stop_token == alone.stop_token);
        stopped += alone.reason == FinishReason::kStop ? 1 : 0;
    }
    CHECK(stopped > 5);  // each of them had a row in the step after its last
}

TEST_CASE("a request whose next token depends on those before it keeps steps from being started ahead") {
    std::vector<SamplingParams> kinds(4, make_params(12));
    kinds[0].frequency_penalty = 0.5F;
    kinds[1].min_tokens = 5;
    kinds[1].stop_token_ids = {3};
    kinds[2].rules.bad_words = {{1, 2}};
    kinds[3].logprobs = kMaxDeviceLogprobs + 1;
    for (const SamplingParams& params : kinds) {
        Bench bench(true);
        const std::vector<int32_t> prompt{1, 2, 3};
        bench.finish({bench.engine->submit(prompt, params), bench.engine->submit(prompt, params)});
        CHECK(bench.engine->stats(0).ahead_steps == 0);
    }
}

TEST_CASE("a request cancelled while its step is under way ends at once, and the others do not notice") {
    const std::vector<int32_t> prompt{5, 6, 7};
    std::vector<int32_t> undisturbed;
    for (const bool cancelling : {false, true}) {
        Bench bench(true);
        std::vector<RequestId> doomed;
        bench.device->held_from = 0;
        if (cancelling) {
            for (int i = 0; i < 5; ++i) doomed.push_back(bench.engine->submit(prompt, make_params(150)));
        }
        const RequestId id = bench.engine->submit(prompt, make_params(100));
        bench.device->held_from = 20;
        for (const RequestId each : doomed) {
            while (bench.said[each].tokens.size() < 5) bench.poll();
            bench.engine->cancel(each);
        }
        bench.device->held_from = FakeDevice::kNever;
        bench.finish(doomed);
        bench.finish({id});
        for (const RequestId each : doomed) {
            CHECK(bench.said[each].reason == FinishReason::kCancelled);
            CHECK(bench.said[each].tokens.size() < 150);
        }
        CHECK(bench.engine->stats(0).kv_blocks_used == 0);
        CHECK(bench.engine->stats(0).ahead_steps > 50);
        if (cancelling) {
            CHECK(bench.said[id].tokens == undisturbed);
        } else {
            undisturbed = bench.said[id].tokens;
        }
    }
}

TEST_CASE("a device that fails with two steps under way ends what ran, once, and serves on") {
    for (const bool at_start : {false, true}) {
        Bench bench(true);
        bench.device->held_from = 0;
        std::vector<RequestId> ids;
        for (int i = 0; i < 3; ++i) {
            ids.push_back(bench.engine->submit(std::vector<int32_t>{1, 2, i}, make_params(140)));
        }
        bench.device->held_from = 10;
        for (const RequestId id : ids) {
            while (bench.said[id].tokens.size() < 3) bench.poll();
        }
        if (at_start) {
            bench.device->fails_at_start = true;
        } else {
            bench.device->failures = 1;
        }
        bench.device->held_from = FakeDevice::kNever;
        bench.finish(ids);
        for (const RequestId id : ids) {
            CHECK(bench.said[id].reason == FinishReason::kError);
            CHECK(bench.said[id].error == "the device failed: the fake device was told to fail");
        }
        const RequestId next = bench.engine->submit(std::vector<int32_t>{1, 2, 3}, make_params(9));
        bench.finish({next});
        CHECK(bench.said[next].reason == FinishReason::kLength);
        CHECK(bench.engine->stats(0).device_failures == 1);
    }
}
