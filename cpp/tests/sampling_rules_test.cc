#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <vector>

#include "sampling/sampler.h"
#include "sampling/token_rules.h"

using namespace castiron;

namespace {

std::vector<float> ramp(size_t vocab) {
    std::vector<float> logits(vocab);
    for (size_t i = 0; i < vocab; ++i) logits[i] = static_cast<float>(i) * 0.01F;
    return logits;
}

std::set<int32_t> open_tokens(const std::vector<float>& row) {
    std::set<int32_t> open;
    for (size_t i = 0; i < row.size(); ++i) {
        if (row[i] != -std::numeric_limits<float>::infinity()) open.insert(static_cast<int32_t>(i));
    }
    return open;
}

std::set<int32_t> all_but(size_t vocab, std::set<int32_t> closed) {
    std::set<int32_t> open;
    for (int32_t i = 0; i < static_cast<int32_t>(vocab); ++i) {
        if (!closed.contains(i)) open.insert(i);
    }
    return open;
}

}  // namespace

TEST_CASE("only allowed tokens stay, wherever they lie") {
    for (const std::vector<int32_t>& allowed :
         {std::vector<int32_t>{0}, {99}, {3, 4, 5}, {0, 50, 99}, {7, 7, 200}, {200}}) {
        TokenRules rules;
        rules.allowed = allowed;
        std::vector<float> row = ramp(100);
        rules.apply(row, {}, {});
        std::set<int32_t> expected(allowed.begin(), allowed.end());
        expected.erase(200);  // outside the row
        CHECK(open_tokens(row) == expected);
    }
}

TEST_CASE("a bad word is cut off at its last token, and only where it has begun") {
    TokenRules rules;
    rules.bad_words = {{5}, {1, 2, 3}, {9, 9}};
    const auto after = [&](const std::vector<int32_t>& output) {
        std::vector<float> row = ramp(20);
        const std::vector<int32_t> prompt{1, 2};  // the prompt may hold anything
        rules.apply(row, prompt, output);
        return open_tokens(row);
    };
    CHECK(after({}) == all_but(20, {5}));
    CHECK(after({1}) == all_but(20, {5}));
    CHECK(after({1, 2}) == all_but(20, {3, 5}));
    CHECK(after({0, 1, 2}) == all_but(20, {3, 5}));
    CHECK(after({1, 2, 0}) == all_but(20, {5}));
    CHECK(after({9}) == all_but(20, {5, 9}));
}

TEST_CASE("no run of the given length appears twice in prompt and output together") {
    TokenRules rules;
    rules.no_repeat_ngram = 3;
    const std::vector<int32_t> prompt{1, 2, 3, 1, 2};
    std::vector<float> row = ramp(10);
    rules.apply(row, prompt, {});
    CHECK(open_tokens(row) == all_but(10, {3}));
    row = ramp(10);
    rules.apply(row, prompt, std::vector<int32_t>{7, 1, 2});  // 1 2 3 and 1 2 7 are there
    CHECK(open_tokens(row) == all_but(10, {3, 7}));
    row = ramp(10);
    rules.apply(row, std::vector<int32_t>{1}, {});
    CHECK(open_tokens(row).size() == 10);
    rules.no_repeat_ngram = 1;  // no token twice
    row = ramp(10);
    rules.apply(row, prompt, {});
    CHECK(open_tokens(row) == all_but(10, {1, 2, 3}));
}

TEST_CASE("a bias is added, also to what is forbidden already") {
    TokenRules rules;
    rules.allowed = {1, 2};
    rules.bias = {{1, 2.5F}, {3, 100.0F}, {400, 1.0F}};
    std::vector<float> row = ramp(10);
    rules.apply(row, {}, {});
    CHECK(row[1] == doctest::Approx(2.51));
    CHECK(open_tokens(row) == std::set<int32_t>{1, 2});
}

TEST_CASE("a mask is read bit by bit, and what it does not reach is forbidden") {
    std::vector<float> row = ramp(70);
    const std::vector<uint32_t> mask{0x80000001U, 0xFFFFFFFFU};
    apply_mask(mask, row);
    std::set<int32_t> expected{0, 31};
    for (int32_t i = 32; i < 64; ++i) expected.insert(i);
    CHECK(open_tokens(row) == expected);
}

TEST_CASE("rules come before the choice and leave log-probabilities raw") {
    const std::vector<float> logits = ramp(64);
    Sampler sampler(64, 64);
    SamplingParams params;
    params.temperature = 0;
    params.logprobs = 1;
    params.rules.allowed = {4, 10};
    std::vector<TokenLogprob> top(1);
    const SampledToken sampled = sampler.sample(logits, {params, 0, {}, {}}, top);
    CHECK(sampled.token == 10);
    CHECK(top[0].token == 63);
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    CHECK(static_cast<double>(sampled.logprob) == doctest::Approx(0.10 - std::log(sum)).epsilon(1e-5));

    const std::vector<uint32_t> none{0, 0};
    CHECK(sampler.sample(logits, {params, 0, {}, {}, none}, top).status == SampleStatus::kNothingAllowed);
    const std::vector<uint32_t> one{1U << 4, 0};
    CHECK(sampler.sample(logits, {params, 0, {}, {}, one}, top).token == 4);
}

TEST_CASE("rules out of range are refused by name") {
    const auto refused = [](auto change, const char* message) {
        TokenRules rules;
        change(rules);
        CHECK_THROWS_WITH_AS(rules.validate(10), doctest::Contains(message), std::invalid_argument);
    };
    refused([](TokenRules& r) { r.allowed = {10}; }, "allowed_token_ids is 10");
    refused([](TokenRules& r) { r.allowed = {3, 2}; }, "must be ascending");
    refused([](TokenRules& r) { r.bad_words = {{}}; }, "no token");
    refused([](TokenRules& r) { r.bad_words = {{1, -1}}; }, "bad_words is -1");
    refused([](TokenRules& r) { r.no_repeat_ngram = -1; }, "no_repeat_ngram_size is -1");
    refused([](TokenRules& r) { r.bias = {{1, NAN}}; }, "not a finite number");
    refused([](TokenRules& r) { r.bias = {{11, 1}}; }, "logit_bias is 11");
}
