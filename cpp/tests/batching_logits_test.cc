#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "tests/engine_support.h"

using namespace castiron;
using namespace std::chrono_literals;
using namespace castiron::testing;

namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

std::chrono::steady_clock::time_point in(std::chrono::milliseconds time) {
    return std::chrono::steady_clock::now() + time;
}

// What somebody outside does with a request's rows until it ends: the token after n others is n * 7 % vocab.
void count_by_seven(LogitsExchange& exchange, RequestId id, std::vector<std::vector<float>>& seen) {
    while (auto wish = exchange.poll(id)) {
        seen.push_back(wish->logits);
        std::fill(wish->logits.begin(), wish->logits.end(), kForbidden);
        wish->logits[static_cast<size_t>(wish->num_output * 7 % kVocab)] = 0;
        exchange.give(id, wish->num_output, wish->logits);
    }
}

}  // namespace

TEST_CASE("tokens are chosen from what was made of the logits, and log-probabilities are of the raw ones") {
    for (const bool on_device : {false, true}) {
        const Limits limits{4, 16, 4, 100};
        Engine engine(std::make_unique<FakeDevice>(limits, kVocab, on_device), limits, kVocab, {});
        SamplingParams params;
        params.temperature = 0;
        params.max_tokens = 12;
        const std::vector<int32_t> prompt(20, 5);
        const RequestId free = engine.submit(prompt, params);
        params.process_logits = true;
        params.logprobs = 0;
        const RequestId bound = engine.submit(prompt, params);
        std::vector<std::vector<float>> seen;
        std::thread other([&] { count_by_seven(engine.processors(), bound, seen); });
        Outcomes outcomes;
        finish_all(engine, outcomes, 2);
        other.join();
        std::vector<int32_t> history = prompt;
        REQUIRE(outcomes.at(bound).tokens.size() == 12);
        for (size_t i = 0; i < 12; ++i) {
            const int32_t token = static_cast<int32_t>(i * 7 % kVocab);
            CHECK(outcomes.at(bound).tokens[i] == token);
            std::vector<float> logits(kVocab);
            hashed_logits(history, logits);
            CHECK(seen[i] == logits);
            double sum = 0;
            for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
            CHECK(static_cast<double>(outcomes.at(bound).logprobs[i].logprob) ==
                  doctest::Approx(static_cast<double>(logits[static_cast<size_t>(token)]) - std::log(sum))
                      .epsilon(1e-5));
            history.push_back(token);
        }
        CHECK(outcomes.at(free).tokens.size() == 12);
        CHECK(outcomes.at(free).tokens != outcomes.at(bound).tokens);
    }
}

TEST_CASE("a refused row ends its request with the reason, and no other") {
    const Limits limits{4, 16, 4, 100};
    Engine engine(std::make_unique<FakeDevice>(limits, kVocab), limits, kVocab, {});
    SamplingParams params;
    params.max_tokens = 5;
    const RequestId good = engine.submit(std::vector<int32_t>(3, 5), params);
    params.process_logits = true;
    const RequestId bad = engine.submit(std::vector<int32_t>(3, 6), params);
    const auto wish = engine.processors().poll(bad);
    REQUIRE(wish.has_value());
    engine.processors().refuse(bad, wish->num_output, "no such luck");
    Outcomes outcomes;
    finish_all(engine, outcomes, 2);
    CHECK(outcomes.at(bad).error == "no such luck");
    CHECK(outcomes.at(good).reason == FinishReason::kLength);
    CHECK_FALSE(engine.processors().poll(bad).has_value());
}

TEST_CASE("a row that nobody gives back is waited for until the deadline") {
    LogitsExchange exchange;
    exchange.add(1, 4, 10);
    const std::vector<float> row{1, 2, 3, 4};
    exchange.show(1, {}, row);
    CHECK_THROWS_WITH(static_cast<void>(exchange.wait(1, in(20ms))),
                      "the logits processor took too long over a token");
    const std::vector<int32_t> output{8, 9};
    exchange.show(1, output, row);
    exchange.give(1, 0, std::vector<float>{9, 9, 9, 9});  // too late for that row
    CHECK_THROWS(static_cast<void>(exchange.wait(1, in(20ms))));
    exchange.show(1, output, row);
    const auto wish = exchange.poll(1);
    REQUIRE(wish.has_value());
    CHECK(wish->tokens == output);
    exchange.give(1, 2, std::vector<float>{4, 3, 2, 1});
    CHECK(exchange.wait(1, in(20ms))[0] == 4.0F);
    exchange.show(1, output, row);
    exchange.give(1, 2, std::vector<float>{4, 3});
    CHECK_THROWS_WITH(static_cast<void>(exchange.wait(1, in(20ms))),
                      "a row of 2 logits was given back, expected 4");
}

TEST_CASE("an end wakes whoever waits for a request's rows") {
    LogitsExchange exchange;
    exchange.add(1, 4, 10);
    exchange.add(2, 4, 10);
    std::thread dropped([&] { CHECK_FALSE(exchange.poll(1).has_value()); });
    std::thread closed([&] { CHECK_FALSE(exchange.poll(2).has_value()); });
    std::this_thread::sleep_for(5ms);
    exchange.drop(1);
    dropped.join();
    exchange.close();
    closed.join();
    CHECK_FALSE(exchange.poll(7).has_value());
}
