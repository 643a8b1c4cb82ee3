#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "tests/engine_support.h"
#include "tests/oracle_drafter.h"

using namespace castiron;
using namespace castiron::testing;
using namespace std::chrono_literals;

namespace {

// `entry` is that of `token` after `history`, with `top` of the likeliest.
void check_logprobs(const TokenLogprobs& entry, std::span<const int32_t> history, int32_t token, int top) {
    std::vector<float> raw(kVocab);
    hashed_logits(history, raw);
    double sum = 0;
    for (const float logit : raw) sum += std::exp(static_cast<double>(logit));
    CHECK(entry.token == token);
    // Single precision, against a sum of 61 terms.
    CHECK(
        static_cast<double>(entry.logprob) ==
        doctest::Approx(static_cast<double>(raw[static_cast<size_t>(token)]) - std::log(sum)).epsilon(1e-5));
    REQUIRE(entry.top.size() == static_cast<size_t>(top));
    if (top > 0)
        CHECK(raw[static_cast<size_t>(entry.top[0].token)] == *std::max_element(raw.begin(), raw.end()));
}

}  // namespace

TEST_CASE("random schedules: every request ends, and says what it says alone, whoever chooses the tokens") {
    int64_t device_sampled_steps = 0;
    int64_t accepted = 0;
    for (uint32_t seed = 0; seed < 120; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        const auto pick = [&](int low, int high) {
            return low + static_cast<int>(random() % static_cast<uint32_t>(high - low + 1));
        };
        const Limits limits{pick(1, 9), pick(1, 60), pick(1, 9), pick(20, 200)};
        EngineOptions options;
        options.kv_cache_blocks = blocks_for_tokens(limits.max_seq_len) + pick(0, 12);
        options.prefix_caching = random() % 4 != 0;
        if (random() % 2 == 0) options.capacity = CapacityPolicy::kMaxUtilization;
        if (random() % 2 == 0) options.scheduling = SchedulingPolicy::kPriority;
        const std::vector<int32_t> family = random_prompt(random, limits.max_seq_len);
        const bool on_device = seed % 2 == 1;
        std::unique_ptr<Drafter> drafter;
        if (seed % 3 > 0) drafter = std::make_unique<testing::OracleDrafter>(pick(1, 6), kVocab, 6, seed);
        Bench bench(limits, options, on_device, std::move(drafter));
        struct Sent {
            std::vector<int32_t> prompt;
            SamplingParams params;
        };
        std::map<RequestId, Sent> sent;
        Outcomes outcomes;
        std::vector<RequestId> cancelled;
        const int count = pick(1, 30);
        while (static_cast<int>(sent.size()) < count) {
            SamplingParams params = greedy(pick(0, 40));
            if (random() % 2 == 0) {
                params.temperature = 1.5F;
                params.seed = random();
                if (random() % 2 == 0) params.top_k = 5;
                if (random() % 2 == 0) params.top_p = 0.8F;
                if (random() % 3 == 0) params.repetition_penalty = 1.3F;
                if (random() % 3 == 0) params.frequency_penalty = 0.5F;
                if (random() % 3 == 0) params.presence_penalty = -0.5F;
                if (random() % 3 == 0) params.min_p = 0.05F;
                if (random() % 3 == 0) params.top_p_decay = 0.7F;
                if (!on_device && random() % 3 == 0) params.typical_p = 0.7F;
            }
            if (random() % 2 == 0) params.stop_token_ids = {pick(0, kVocab - 1), pick(0, kVocab - 1)};
            if (random() % 3 == 0) params.min_tokens = pick(0, params.max_tokens);
            if (random() % 3 == 0) params.logprobs = random() % 20 == 0 ? kMaxDeviceLogprobs + 1 : pick(0, 3);
            params.context_logits = random() % (on_device ? 40 : 5) == 0;
            params.generation_logits = random() % (on_device ? 40 : 5) == 0;
            if (random() % (on_device ? 40 : 5) == 0) params.prompt_logprobs = pick(0, 3);
            auto prompt = random() % 2 == 0 ? family : random_prompt(random, limits.max_seq_len);
            prompt.resize(static_cast<size_t>(pick(1, limits.max_seq_len - 1)));
            RequestOptions request_options;
            request_options.cache_salt.low = random() % 2;
            if (options.scheduling == SchedulingPolicy::kPriority) request_options.priority = pick(-1, 1);
            const RequestId id = bench.engine->submit(prompt, params, request_options);
            sent[id] = {prompt, params};
            if (random() % 6 == 0) {
                cancelled.push_back(
                    std::next(sent.begin(), pick(0, static_cast<int>(sent.size()) - 1))->first);
                bench.engine->cancel(cancelled.back());
            }
            if (random() % 3 == 0) take(*bench.engine, outcomes, 0s);
        }
        finish_all(*bench.engine, outcomes, sent.size());
        for (const auto& [id, request] : sent) {
            CAPTURE(id);
            const Outcome& outcome = outcomes[id];
            const Alone expected = alone(request.prompt, request.params, limits.max_seq_len);
            CHECK(outcome.error == "");
            if (outcome.reason == FinishReason::kCancelled) {
                CHECK(std::find(cancelled.begin(), cancelled.end(), id) != cancelled.end());
                REQUIRE(outcome.tokens.size() <= expected.tokens.size());
                CHECK(std::equal(outcome.tokens.begin(), outcome.tokens.end(), expected.tokens.begin()));
                continue;
            }
            CHECK(outcome.tokens == expected.tokens);
            CHECK(outcome.reason == expected.reason);
            CHECK(outcome.stop_token == expected.stop_token);
            CHECK(outcome.logprobs.size() == (request.params.logprobs >= 0 ? outcome.tokens.size() : 0));
            std::vector<int32_t> history = request.prompt;
            for (size_t i = 0; i < outcome.logprobs.size(); ++i) {
                check_logprobs(outcome.logprobs[i], history, outcome.tokens[i], request.params.logprobs);
                history.push_back(outcome.tokens[i]);
            }
            const bool scored = request.params.prompt_logprobs >= 0;
            CHECK(outcome.prompt_logprobs.size() == (scored ? request.prompt.size() - 1 : 0));
            for (size_t i = 0; i < outcome.prompt_logprobs.size(); ++i) {
                check_logprobs(outcome.prompt_logprobs[i], std::span(request.prompt).first(i + 1),
                               request.prompt[i + 1], request.params.prompt_logprobs);
            }
            CHECK((outcome.generation_logits != nullptr) == request.params.generation_logits);
            history = request.prompt;
            for (size_t row = 0; outcome.generation_logits && row < outcome.tokens.size(); ++row) {
                std::vector<float> logits(kVocab);
                hashed_logits(history, logits);
                CHECK(
                    std::equal(logits.begin(), logits.end(), outcome.generation_logits.get() + row * kVocab));
                history.push_back(outcome.tokens[row]);
            }
            CHECK((outcome.context_logits != nullptr) == request.params.context_logits);
            if (!outcome.context_logits) continue;
            std::vector<float> logits(kVocab);
            for (size_t row = 0; row < request.prompt.size(); ++row) {
                hashed_logits(std::span(request.prompt).first(row + 1), logits);
                CHECK(std::equal(logits.begin(), logits.end(), outcome.context_logits.get() + row * kVocab));
            }
        }
        const EngineStats stats = idle_stats(*bench.engine);
        CHECK(stats.kv_blocks_used == 0);
        CHECK(stats.kv_blocks_promised == 0);
        CHECK(stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total);
        CHECK(stats.kv_integrity_error == "");
        CHECK(stats.requests_submitted == static_cast<int64_t>(sent.size()));
        int64_t ended = 0;
        for (const int64_t finished : stats.requests_finished) ended += finished;
        CHECK(ended == stats.requests_submitted);
        CHECK(stats.device_failures == 0);
        CHECK(stats.device_sampled_steps <= (on_device ? stats.steps : 0));
        device_sampled_steps += stats.device_sampled_steps;
        accepted += stats.accepted_tokens;
        CHECK(stats.accepted_tokens <= stats.draft_tokens);
    }
    CHECK(accepted > 1000);
    CHECK(device_sampled_steps > 1000);
}

TEST_CASE("submitting, cancelling and polling from many threads loses nothing") {
    const Limits limits{6, 24, 6, 100};
    EngineOptions options;
    options.kv_cache_blocks = 9;
    Bench bench(limits, options);
    constexpr int kThreads = 4;
    constexpr int kEach = 60;
    Outcomes outcomes;
    std::thread poller([&] { finish_all(*bench.engine, outcomes, kThreads * kEach); });
    std::vector<std::thread> callers;
    for (uint32_t thread = 0; thread < kThreads; ++thread) {
        callers.emplace_back([&, thread] {
            std::mt19937 random(thread);
            for (int i = 0; i < kEach; ++i) {
                const auto prompt = random_prompt(random, 1 + static_cast<int>(random() % 50));
                const RequestId id =
                    bench.engine->submit(prompt, greedy(1 + static_cast<int>(random() % 20)));
                if (random() % 3 == 0) bench.engine->cancel(id - static_cast<RequestId>(random() % 3));
                if (random() % 10 == 0) static_cast<void>(bench.engine->stats(5));
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    poller.join();
    const EngineStats stats = idle_stats(*bench.engine);
    CHECK(stats.kv_blocks_used == 0);
    CHECK(stats.requests_submitted == kThreads * kEach);
}

TEST_CASE("a slow caller gets the news of many steps as one event") {
    Bench bench({4, 64, 4, 200});
    const std::vector<int32_t> prompt = {1, 2, 3};
    bench.engine->submit(prompt, greedy(50));
    static_cast<void>(idle_stats(*bench.engine));
    while (bench.engine->stats(0).generated_tokens < 50) std::this_thread::sleep_for(1ms);
    const auto events = bench.engine->poll(0s);
    REQUIRE(events.size() == 1);
    CHECK(events[0].token_ids.size() == 50);
    CHECK(events[0].finished);
    CHECK(events[0].prompt_tokens == 3);
    CHECK(bench.engine->poll(0s).empty());
}

TEST_CASE("a cancelled request ends within a step and gives its blocks back") {
    Bench bench({4, 64, 4, 4000});
    bench.device->held_from = 5;
    const std::vector<int32_t> prompt(40, 1);
    const RequestId id = bench.engine->submit(prompt, greedy(3000));
    Outcomes outcomes;
    while (outcomes[id].tokens.size() < 3) take(*bench.engine, outcomes, 1s);
    bench.engine->cancel(id);
    bench.device->held_from = FakeDevice::kNever;
    finish_all(*bench.engine, outcomes, 1);
    CHECK(outcomes[id].reason == FinishReason::kCancelled);
    CHECK(outcomes[id].tokens.size() < 20);
    CHECK(idle_stats(*bench.engine).kv_blocks_used == 0);
    bench.engine->cancel(id);  // a second time, and an id that never was
    bench.engine->cancel(123456);
    CHECK(bench.engine->poll(10ms).empty());
}

TEST_CASE("shutdown cancels what runs and waits, and what is left can be polled") {
    Bench bench({1, 64, 1, 4000});
    bench.device->delay = 1ms;
    const std::vector<int32_t> prompt = {5, 6};
    for (int i = 0; i < 5; ++i) bench.engine->submit(prompt, greedy(3000));
    std::this_thread::sleep_for(20ms);
    const auto begin = std::chrono::steady_clock::now();
    bench.engine->shutdown();
    CHECK(std::chrono::steady_clock::now() - begin < 2s);
    Outcomes outcomes;
    take(*bench.engine, outcomes, 10s);
    CHECK(outcomes.size() == 5);
    for (const auto& [id, outcome] : outcomes) CHECK(outcome.reason == FinishReason::kCancelled);
    CHECK_THROWS_WITH_AS(bench.engine->submit(prompt, greedy(1)), "the engine was shut down",
                         EngineDeadError);
    CHECK(bench.engine->stats(0).kv_blocks_used == 0);
    bench.engine->shutdown();
}

TEST_CASE("requests that cannot be served are refused with the numbers") {
    EngineOptions options;
    options.kv_cache_blocks = 2;
    options.max_queue_size = 3;
    Bench bench({1, 64, 1, 100}, options);
    Engine& engine = *bench.engine;
    const std::vector<int32_t> long_prompt(100, 1);
    CHECK_THROWS_WITH_AS(engine.submit({}, greedy(1)), "the prompt is empty; at least one token is needed",
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(engine.submit(long_prompt, greedy(7)),
                         "maximum context length is 100 tokens; the prompt has 100 and 7 are to be generated",
                         std::invalid_argument);
    CHECK_THROWS_AS(engine.submit(std::vector<int32_t>{kVocab}, greedy(1)), std::invalid_argument);
    CHECK_THROWS_AS(engine.submit(std::vector<int32_t>{-1}, greedy(1)), std::invalid_argument);
    CHECK_THROWS_AS(engine.submit(std::vector<int32_t>(70, 1), greedy(1)),
                    std::invalid_argument);  // 3 blocks
    bench.device->held_from = 0;
    const std::vector<int32_t> prompt = {1};
    int accepted = 0;
    const auto flood = [&] {
        for (; accepted < 100; ++accepted) engine.submit(prompt, greedy(20));
    };
    CHECK_THROWS_WITH_AS(flood(), "3 requests are waiting already (max_queue_size)", QueueFullError);
    CHECK(accepted >= 3);
    CHECK(accepted <= 5);
    bench.device->held_from = FakeDevice::kNever;
}

TEST_CASE("options beyond what the engine was built for are refused") {
    const Limits limits{4, 64, 4, 100};
    const auto make = [&](auto change) {
        EngineOptions options;
        change(options);
        Bench bench(limits, options);
    };
    CHECK_THROWS_WITH_AS(
        make([](EngineOptions& o) { o.max_batch_size = 5; }),
        "max_batch_size is 5; the engine was built for at most 4: choose less, or build it with a "
        "larger limit",
        std::invalid_argument);
    CHECK_THROWS_AS(make([](EngineOptions& o) { o.max_num_tokens = 65; }), std::invalid_argument);
    CHECK_THROWS_AS(make([](EngineOptions& o) { o.kv_cache_blocks = -1; }), std::invalid_argument);
    CHECK_THROWS_AS(make([](EngineOptions& o) { o.max_queue_size = 0; }), std::invalid_argument);
    CHECK_THROWS_AS(make([](EngineOptions& o) { o.vocab_limit = kVocab + 1; }), std::invalid_argument);
    make([](EngineOptions& o) { o.max_batch_size = 2, o.max_num_tokens = 8, o.vocab_limit = 10; });
}

TEST_CASE("prefill only: max_tokens 0 gives context logits and no token") {
    Bench bench({4, 64, 4, 100});
    SamplingParams params = greedy(0);
    params.context_logits = true;
    const std::vector<int32_t> prompt(100, 7);  // as long as the context
    Outcomes outcomes;
    const RequestId id = bench.engine->submit(prompt, params);
    finish_all(*bench.engine, outcomes, 1);
    CHECK(outcomes[id].tokens.empty());
    CHECK(outcomes[id].reason == FinishReason::kLength);
    REQUIRE(outcomes[id].context_logits != nullptr);
    std::vector<float> logits(kVocab);
    hashed_logits(prompt, logits);
    CHECK(std::equal(logits.begin(), logits.end(), outcomes[id].context_logits.get() + 99 * kVocab));
}

TEST_CASE("a prompt whose logits are not finite is not scored, and the other prompt is") {
    Bench bench({4, 64, 4, 100});
    SamplingParams params = greedy(1);
    params.prompt_logprobs = 2;
    bench.device->poisoned_history = std::vector<int32_t>(10, 7);
    Outcomes outcomes;
    const RequestId bad = bench.engine->submit(std::vector<int32_t>(20, 7), params);
    const RequestId good = bench.engine->submit(std::vector<int32_t>(20, 8), params);
    finish_all(*bench.engine, outcomes, 2);
    CHECK(outcomes[bad].reason == FinishReason::kError);
    CHECK(outcomes[bad].error.find("not finite (NaN or infinity) at position 9") != std::string::npos);
    CHECK(outcomes[bad].prompt_logprobs.empty());
    CHECK(outcomes[good].prompt_logprobs.size() == 19);
}

TEST_CASE("the trace tells what each step was made of") {
    Bench bench({4, 10, 4, 100});
    const std::vector<int32_t> prompt(25, 7);
    bench.engine->submit(prompt, greedy(3));
    Outcomes outcomes;
    finish_all(*bench.engine, outcomes, 1);
    const EngineStats stats = bench.engine->stats(100);
    REQUIRE(stats.recent_steps.size() == 5);  // prefill of 10, 10 and 5, then two decodes
    CHECK(stats.recent_steps[0].prefill_tokens == 10);
    CHECK(stats.recent_steps[2].prefill_tokens == 5);
    CHECK(stats.recent_steps[2].logit_rows == 1);
    CHECK(stats.recent_steps[3].decode_tokens == 1);
    CHECK(stats.recent_steps[4].finished == 1);
    CHECK(stats.recent_steps[4].kv_blocks_used == 0);
    CHECK(stats.steps == 5);
    CHECK(stats.prompt_tokens == 25);
    CHECK(stats.generated_tokens == 3);
    CHECK(stats.last_step.step == 5);
}
