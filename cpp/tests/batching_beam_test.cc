// Beam searches in the engine, against a search that ranks whole vocabularies and knows no cache.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "tests/engine_support.h"

using namespace castiron;
using namespace castiron::testing;

namespace {

struct Text {
    std::vector<int32_t> tokens;  // a stop token among them
    double sum = 0;
    double score = 0;
};

bool better(const Text& a, const Text& b) {
    return a.sum > b.sum;
}

std::vector<double> log_softmax(const std::vector<int32_t>& prompt, const std::vector<int32_t>& output) {
    std::vector<int32_t> history = prompt;
    history.insert(history.end(), output.begin(), output.end());
    std::vector<float> logits(kVocab);
    hashed_logits(history, logits);
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    std::vector<double> result;
    for (const float logit : logits) result.push_back(static_cast<double>(logit) - std::log(sum));
    return result;
}

// transformers' beam search, word for word: all beams are kept in one list of candidates, sorted whole.
std::vector<Text> search(const std::vector<int32_t>& prompt, const SamplingParams& params, int max_new) {
    const auto width = static_cast<size_t>(params.beam_width);
    const auto& stops = params.stop_token_ids;
    std::vector<Text> live(1);
    std::vector<Text> finished;
    for (int length = 1; length <= max_new; ++length) {
        std::vector<Text> all;
        for (const Text& beam : live) {
            const auto row = log_softmax(prompt, beam.tokens);
            for (int32_t token = 0; token < kVocab; ++token) {
                const bool stop = std::find(stops.begin(), stops.end(), token) != stops.end();
                if (stop && length <= params.min_tokens) continue;
                Text next = beam;
                next.tokens.push_back(token);
                next.sum += row[static_cast<size_t>(token)];
                all.push_back(next);
            }
        }
        std::stable_sort(all.begin(), all.end(), better);
        const auto penalty = [&](double sum, int tokens) {
            return sum / std::pow(tokens, static_cast<double>(params.length_penalty));
        };
        live.clear();
        for (size_t rank = 0; rank < all.size(); ++rank) {
            const bool stop = std::find(stops.begin(), stops.end(), all[rank].tokens.back()) != stops.end();
            if ((stop || length == max_new) && rank < width) {
                finished.push_back(all[rank]);
                finished.back().score = penalty(all[rank].sum, length);
            }
            if (!stop && length < max_new && live.size() < width) live.push_back(all[rank]);
        }
        std::stable_sort(finished.begin(), finished.end(),
                         [](const Text& a, const Text& b) { return a.score > b.score; });
        if (finished.size() > width) finished.resize(width);
        if (live.empty() || finished.size() < width) continue;
        if (params.early_stopping == EarlyStopping::kFirstFinished) break;
        const bool far = params.early_stopping == EarlyStopping::kNever && params.length_penalty > 0;
        if (penalty(live[0].sum, far ? max_new : length) <= finished.back().score) break;
    }
    return finished;
}

void check_found(const Outcome& outcome, const std::vector<Text>& expected) {
    CHECK(outcome.error == "");
    CHECK(outcome.tokens.empty());
    REQUIRE(outcome.beams.size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
        const BeamOutput& found = outcome.beams[i];
        std::vector<int32_t> tokens = found.token_ids;
        if (found.stop_token_id >= 0) tokens.push_back(found.stop_token_id);
        CHECK(tokens == expected[i].tokens);
        CHECK(found.token_ids.size() == found.logprobs.size());
        // Sums of single precision log-probabilities of up to 40 tokens.
        CHECK(found.cumulative_logprob == doctest::Approx(expected[i].sum).epsilon(1e-5));
        CHECK(found.score == doctest::Approx(expected[i].score).epsilon(1e-5));
    }
}

}  // namespace

TEST_CASE("beam searches find what a search without batches and caches finds, beside other requests") {
    int64_t device_sampled_steps = 0;
    for (unsigned seed = 0; seed < 60; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        const auto pick = [&](int low, int high) {
            return low + static_cast<int>(random() % static_cast<uint32_t>(high - low + 1));
        };
        const Limits limits{pick(3, 9), pick(9, 60), pick(9, 12), pick(60, 150)};
        const int max_width = std::min(limits.max_batch_size, 5);
        EngineOptions options;
        const int longest = blocks_for_tokens(limits.max_seq_len);
        options.kv_cache_blocks = longest * (1 + max_width) + pick(0, 12);
        options.prefix_caching = random() % 4 != 0;
        if (random() % 2 == 0) options.capacity = CapacityPolicy::kMaxUtilization;
        if (random() % 2 == 0) options.scheduling = SchedulingPolicy::kPriority;
        const bool on_device = seed % 2 == 1;
        auto owned = std::make_unique<FakeDevice>(limits, kVocab, on_device);
        Engine engine(std::move(owned), limits, kVocab, options);
        const std::vector<int32_t> family = random_prompt(random, limits.max_seq_len);
        struct Sent {
            std::vector<int32_t> prompt;
            SamplingParams params;
            bool cancelled = false;
        };
        std::map<RequestId, Sent> sent;
        for (int i = pick(1, 8); i > 0; --i) {
            SamplingParams params;
            params.temperature = 0;
            params.max_tokens = pick(1, 40);
            if (random() % 3 != 0) {
                params.beam_width = pick(1, max_width);
                params.length_penalty = static_cast<float>(pick(-2, 4)) / 2;
                params.early_stopping = static_cast<EarlyStopping>(pick(0, 2));
                params.logprobs = pick(-1, 0);
            }
            for (int stops = pick(0, 6); stops > 0; --stops)
                params.stop_token_ids.push_back(pick(0, kVocab - 1));
            if (random() % 4 == 0) params.min_tokens = pick(0, params.max_tokens);
            auto prompt = random() % 2 == 0 ? family : random_prompt(random, limits.max_seq_len);
            prompt.resize(static_cast<size_t>(pick(1, limits.max_seq_len - 1)));
            RequestOptions request_options;
            if (options.scheduling == SchedulingPolicy::kPriority) request_options.priority = pick(-1, 1);
            const RequestId id = engine.submit(prompt, params, request_options);
            sent[id] = {prompt, params, random() % 8 == 0};
            if (sent[id].cancelled) engine.cancel(id);
        }
        Outcomes outcomes;
        finish_all(engine, outcomes, sent.size());
        for (const auto& [id, request] : sent) {
            CAPTURE(id);
            const Outcome& outcome = outcomes.at(id);
            const int room = limits.max_seq_len - static_cast<int>(request.prompt.size());
            if (request.cancelled && outcome.reason == FinishReason::kCancelled) continue;
            if (request.params.beam_width == 0) {
                CHECK(outcome.error == "");
                continue;
            }
            check_found(outcome,
                        search(request.prompt, request.params, std::min(room, request.params.max_tokens)));
        }
        const EngineStats stats = engine.stats(1);
        CHECK(stats.kv_blocks_used == 0);
        CHECK(stats.kv_blocks_promised == 0);
        CHECK(stats.kv_integrity_error == "");
        device_sampled_steps += stats.device_sampled_steps;
    }
    CHECK(device_sampled_steps > 100);
}

TEST_CASE("a beam search that is wider than the engine, or needs more blocks than it has, is refused") {
    const Limits limits{4, 64, 4, 200};
    EngineOptions options;
    options.kv_cache_blocks = 8;
    Engine engine(std::make_unique<FakeDevice>(limits, kVocab), limits, kVocab, options);
    SamplingParams params;
    params.beam_width = 5;
    CHECK_THROWS_WITH_AS(
        engine.submit(std::vector<int32_t>(3, 1), params),
        "the beam search is 5 beams wide, and this engine runs at most 4 sequences at a time",
        std::invalid_argument);
    params.beam_width = 4;
    params.max_tokens = 33;  // 35 tokens each: two blocks, and one of the prompt's
    CHECK_THROWS_AS(engine.submit(std::vector<int32_t>(3, 1), params), std::invalid_argument);
    params.max_tokens = 29;
    const RequestId id = engine.submit(std::vector<int32_t>(3, 1), params);
    Outcomes outcomes;
    finish_all(engine, outcomes, 1);
    CHECK(outcomes.at(id).beams.size() == 4);
    params.max_tokens = 0;
    CHECK_THROWS_AS(engine.submit(std::vector<int32_t>(3, 1), params), std::invalid_argument);
}

TEST_CASE("rules that leave a beam search no token end it with an error") {
    const Limits limits{4, 64, 4, 200};
    Engine engine(std::make_unique<FakeDevice>(limits, kVocab), limits, kVocab, {});
    SamplingParams params;
    params.beam_width = 3;
    params.rules.allowed = {7};
    params.stop_token_ids = {7};
    params.min_tokens = 2;
    const RequestId none = engine.submit(std::vector<int32_t>(3, 1), params);
    Outcomes outcomes;
    finish_all(engine, outcomes, 1);
    CHECK(outcomes.at(none).error == "the beam search found no text: the request's rules leave no token");
    params.min_tokens = 0;
    const RequestId one = engine.submit(std::vector<int32_t>(3, 1), params);
    finish_all(engine, outcomes, 2);
    CHECK(outcomes.at(one).beams.size() == 1);
}
