// An engine on the fake device, and all that comes out of it, put together by request.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "batching/engine.h"
#include "tests/alone.h"
#include "tests/fake_device.h"

namespace castiron::testing {

inline constexpr int kVocab = 61;

// All that came for a request, put together.
struct Outcome {
    std::vector<int32_t> tokens;
    std::vector<TokenLogprobs> logprobs;
    std::vector<TokenLogprobs> prompt_logprobs;
    std::shared_ptr<float[]> context_logits;
    std::shared_ptr<float[]> generation_logits;
    std::vector<BeamOutput> beams;
    FinishReason reason = FinishReason::kNone;
    int32_t stop_token = -1;
    std::string error;
    bool finished = false;
    int events = 0;
};
using Outcomes = std::map<RequestId, Outcome>;

inline void take(Engine& engine, Outcomes& outcomes, std::chrono::duration<double> timeout) {
    for (Event& event : engine.poll(timeout)) {
        Outcome& outcome = outcomes[event.request_id];
        CHECK_FALSE(outcome.finished);
        outcome.tokens.insert(outcome.tokens.end(), event.token_ids.begin(), event.token_ids.end());
        for (const TokenLogprobs& entry : event.logprobs) outcome.logprobs.push_back(entry);
        if (!event.prompt_logprobs.empty()) outcome.prompt_logprobs = event.prompt_logprobs;
        if (event.context_logits) outcome.context_logits = event.context_logits;
        if (event.generation_logits) outcome.generation_logits = event.generation_logits;
        if (!event.beams.empty()) outcome.beams = event.beams;
        outcome.reason = event.finish_reason;
        outcome.stop_token = event.stop_token_id;
        outcome.error = event.error;
        outcome.finished = event.finished;
        ++outcome.events;
    }
}

// Polls until `count` requests have ended. A hang fails the test instead of blocking it.
inline void finish_all(Engine& engine, Outcomes& outcomes, size_t count,
                       std::chrono::seconds patience = std::chrono::seconds(120)) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    const auto ended = [&] {
        return std::count_if(outcomes.begin(), outcomes.end(),
                             [](const auto& entry) { return entry.second.finished; });
    };
    while (ended() < static_cast<std::ptrdiff_t>(count)) {
        REQUIRE(std::chrono::steady_clock::now() < deadline);
        take(engine, outcomes, std::chrono::milliseconds(100));
    }
}

// What a request should say, in an engine for sequences of max_seq_len.
inline Alone alone(const std::vector<int32_t>& prompt, const SamplingParams& params, int max_seq_len) {
    return alone(kVocab, prompt, params, params.seed.value_or(0),
                 std::min(params.max_tokens, max_seq_len - static_cast<int>(prompt.size())));
}

struct Bench {
    explicit Bench(const Limits& limits, EngineOptions options = {}, bool on_device = false,
                   std::unique_ptr<Drafter> drafter = nullptr) {
        auto owned = std::make_unique<FakeDevice>(limits, kVocab, on_device);
        device = owned.get();
        engine = std::make_unique<Engine>(std::move(owned), limits, kVocab, options, std::move(drafter));
    }
    FakeDevice* device;
    std::unique_ptr<Engine> engine;
};

inline std::vector<int32_t> random_prompt(std::mt19937& random, int length) {
    std::vector<int32_t> prompt(static_cast<size_t>(length));
    for (int32_t& token : prompt) token = static_cast<int32_t>(random() % kVocab);
    return prompt;
}

inline SamplingParams greedy(int max_tokens) {
    SamplingParams params;
    params.temperature = 0;
    params.max_tokens = max_tokens;
    return params;
}

// Waits until stats() shows an idle engine.
inline EngineStats idle_stats(const Engine& engine) {
    for (int i = 0; i < 2000; ++i) {
        EngineStats stats = engine.stats(1);
        if (stats.running == 0 && stats.waiting == 0) return stats;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    FAIL("the engine did not become idle");
    return {};
}

}  // namespace castiron::testing
