#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "sampling/philox.h"
#include "sampling/sampler.h"

using namespace castiron;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What the distribution should be, by full sorts in double: the definition, written for clarity.
std::vector<double> reference_distribution(const std::vector<float>& logits, const SamplingParams& params,
                                           const std::vector<int32_t>& prompt,
                                           const std::vector<int32_t>& output) {
    const size_t vocab = logits.size();
    std::vector<double> x(logits.begin(), logits.end());
    std::map<int32_t, int> in_output;
    for (const int32_t token : output) ++in_output[token];
    std::map<int32_t, int> anywhere = in_output;
    for (const int32_t token : prompt) ++anywhere[token];
    const double repetition = static_cast<double>(params.repetition_penalty);
    for (const auto& [token, count] : anywhere) {
        double& value = x[static_cast<size_t>(token)];
        value = value > 0 ? value / repetition : value * repetition;
    }
    for (const auto& [token, count] : in_output) {
        x[static_cast<size_t>(token)] -= static_cast<double>(params.frequency_penalty) * count +
                                         static_cast<double>(params.presence_penalty);
    }
    std::vector<size_t> order(vocab);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
    std::vector<double> p(vocab);
    const double max = x[order[0]];
    double sum = 0;
    const size_t k = params.top_k > 0 ? std::min(vocab, static_cast<size_t>(params.top_k)) : vocab;
    for (size_t i = 0; i < k; ++i) {
        sum += p[order[i]] = std::exp((x[order[i]] - max) / static_cast<double>(params.temperature));
    }
    double before = 0;
    for (size_t i = 0; i < vocab; ++i) {
        double& mass = p[order[i]];
        const bool in_top_p =
            i == 0 || params.top_p >= 1.0F || before < static_cast<double>(params.top_p) * sum;
        before += mass;
        if (!in_top_p || mass < static_cast<double>(params.min_p) * p[order[0]]) mass = 0;
    }
    const double kept = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& mass : p) mass /= kept;
    return p;
}

// Upper 1e-6 quantile of chi-square with `freedom` degrees, by Wilson and Hilferty; 4.753 is the normal's.
double chi_square_limit(double freedom) {
    const double t = 2.0 / (9.0 * freedom);
    return freedom * std::pow(1.0 - t + 4.753 * std::sqrt(t), 3);
}

std::vector<float> random_logits(size_t vocab, float spread, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0F, spread);
    std::vector<float> logits(vocab);
    for (float& logit : logits) logit = normal(random);
    return logits;
}

int32_t sample_one(Sampler& sampler, const std::vector<float>& logits, const SamplingParams& params,
                   uint64_t seed = 0, const std::vector<int32_t>& prompt = {0},
                   const std::vector<int32_t>& output = {}) {
    const SampledToken sampled = sampler.sample(logits, {params, seed, prompt, output}, {});
    REQUIRE(sampled.status == SampleStatus::kOk);
    return sampled.token;
}

}  // namespace

TEST_CASE("Philox4x32-10 gives the known answers of its authors") {
    // kat_vectors of Random123.
    using Counter = std::array<uint32_t, 4>;
    CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Counter{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8});
    CHECK(philox4x32({0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF}, {0xFFFFFFFF, 0xFFFFFFFF}) ==
          Counter{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD});
    CHECK(philox4x32({0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, {0xA4093822, 0x299F31D0}) ==
          Counter{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1});
}

TEST_CASE("sampled frequencies follow the distribution of the definition") {
    struct Case {
        const char* name;
        SamplingParams params;
    };
    std::vector<Case> cases;
    const auto add = [&](const char* name, auto change) {
        SamplingParams params;
        change(params);
        cases.push_back({name, params});
    };
    add("temperature 1", [](SamplingParams&) {});
    add("temperature 0.3", [](SamplingParams& p) { p.temperature = 0.3F; });
    add("temperature 2", [](SamplingParams& p) { p.temperature = 2.0F; });
    add("top-k 1", [](SamplingParams& p) { p.top_k = 1; });
    add("top-k 7", [](SamplingParams& p) { p.top_k = 7; });
    add("top-p 0.5", [](SamplingParams& p) { p.top_p = 0.5F; });
    add("top-p 0.95", [](SamplingParams& p) { p.top_p = 0.95F; });
    add("top-p tiny", [](SamplingParams& p) { p.top_p = 1e-6F; });
    add("min-p 0.1", [](SamplingParams& p) { p.min_p = 0.1F; });
    add("top-k, top-p", [](SamplingParams& p) { p.top_k = 20, p.top_p = 0.8F; });
    add("top-p, min-p", [](SamplingParams& p) { p.top_p = 0.9F, p.min_p = 0.05F; });
    add("top-k, top-p, min-p", [](SamplingParams& p) { p.top_k = 40, p.top_p = 0.9F, p.min_p = 0.02F; });
    add("penalties", [](SamplingParams& p) {
        p.repetition_penalty = 1.3F, p.presence_penalty = 0.5F, p.frequency_penalty = 0.4F;
    });
    add("penalties, top-p", [](SamplingParams& p) {
        p.repetition_penalty = 0.7F, p.presence_penalty = -0.5F, p.top_p = 0.7F, p.temperature = 0.8F;
    });
    const std::vector<int32_t> prompt = {1, 2, 3, 3, 4, 90};
    const std::vector<int32_t> output = {2, 5, 5, 5, 6, 90};
    for (const size_t vocab : {size_t{100}, size_t{1000}}) {
        Sampler sampler(static_cast<int>(vocab), static_cast<int>(vocab));
        for (uint32_t seed = 0; seed < 3; ++seed) {
            const std::vector<float> logits = random_logits(vocab, 1.5F, seed);
            for (const Case& one : cases) {
                CAPTURE(vocab);
                CAPTURE(seed);
                CAPTURE(one.name);
                const std::vector<double> p = reference_distribution(logits, one.params, prompt, output);
                constexpr int kDraws = 20000;
                std::vector<int> counts(vocab, 0);
                for (uint64_t i = 0; i < kDraws; ++i) {
                    ++counts[static_cast<size_t>(
                        sample_one(sampler, logits, one.params, 1000 * seed + i, prompt, output))];
                }
                double chi_square = 0;
                double freedom = -1;
                double rare_expected = 0;  // cells under 5 expected draws are counted as one
                int rare_counted = 0;
                for (size_t id = 0; id < vocab; ++id) {
                    if (p[id] == 0) {
                        CHECK(counts[id] == 0);
                    } else if (p[id] * kDraws < 5) {
                        rare_expected += p[id] * kDraws;
                        rare_counted += counts[id];
                    } else {
                        const double expected = p[id] * kDraws;
                        chi_square += (counts[id] - expected) * (counts[id] - expected) / expected;
                        freedom += 1;
                    }
                }
                if (rare_expected >= 5) {
                    chi_square +=
                        (rare_counted - rare_expected) * (rare_counted - rare_expected) / rare_expected;
                    freedom += 1;
                }
                if (freedom > 0) CHECK(chi_square < chi_square_limit(freedom));
            }
        }
    }
}

TEST_CASE("what is kept is exactly the set of the definition, at any vocabulary size") {
    // Never one token more or less: each kept token of not too small a share turns up, no other does.
    for (const size_t vocab :
         {size_t{1}, size_t{2}, size_t{63}, size_t{64}, size_t{65}, size_t{300}, size_t{5000}}) {
        Sampler sampler(static_cast<int>(vocab), static_cast<int>(vocab));
        for (uint32_t seed = 0; seed < 20; ++seed) {
            std::mt19937 random(seed);
            const std::vector<float> logits =
                random_logits(vocab, 0.5F + static_cast<float>(seed % 5), seed + 77);
            SamplingParams params;
            if (random() % 2 == 0) params.top_k = 1 + static_cast<int>(random() % vocab);
            if (random() % 2 == 0) params.top_p = 0.05F + 0.9F * static_cast<float>(random() % 100) / 100.0F;
            if (random() % 2 == 0) params.min_p = static_cast<float>(random() % 50) / 100.0F;
            params.temperature = 0.2F + static_cast<float>(random() % 20) / 10.0F;
            CAPTURE(vocab);
            CAPTURE(seed);
            const std::vector<double> p = reference_distribution(logits, params, {}, {});
            for (uint64_t draw = 0; draw < 500; ++draw) {
                const auto token = static_cast<size_t>(sample_one(sampler, logits, params, draw));
                REQUIRE(token < vocab);
                CHECK(p[token] > 0);
            }
        }
    }
}

TEST_CASE("greedy takes the largest, of equal ones the lowest id") {
    SamplingParams params;
    params.temperature = 0;
    for (const size_t vocab : {size_t{1}, size_t{7}, size_t{64}, size_t{1000}, size_t{49152}}) {
        Sampler sampler(static_cast<int>(vocab), static_cast<int>(vocab));
        std::vector<float> logits = random_logits(vocab, 2.0F, 5);
        CHECK(sample_one(sampler, logits, params) ==
              std::max_element(logits.begin(), logits.end()) - logits.begin());
        std::fill(logits.begin(), logits.end(), -3.0F);
        CHECK(sample_one(sampler, logits, params) == 0);
        logits[vocab - 1] = logits[vocab / 2] = 9.0F;
        CHECK(sample_one(sampler, logits, params) == static_cast<int32_t>(vocab / 2));
    }
}

TEST_CASE("equal logits are drawn evenly, and top-k and top-p cut them by id") {
    constexpr int kVocab = 3000;
    Sampler sampler(kVocab, kVocab);
    const std::vector<float> logits(kVocab, 1.25F);
    SamplingParams params;
    params.top_k = 10;
    for (uint64_t seed = 0; seed < 200; ++seed) CHECK(sample_one(sampler, logits, params, seed) < 10);
    params.top_k = 0;
    params.top_p = 0.1F;
    int32_t largest = 0;
    for (uint64_t seed = 0; seed < 5000; ++seed) {
        largest = std::max(largest, sample_one(sampler, logits, params, seed));
    }
    CHECK(largest < 301);
    CHECK(largest > 290);
}

TEST_CASE("the same seed and position give the same token, another seed another one") {
    constexpr int kVocab = 500;
    Sampler sampler(kVocab, kVocab);
    const std::vector<float> logits = random_logits(kVocab, 1.0F, 3);
    const SamplingParams params;
    int same = 0;
    for (uint64_t seed = 0; seed < 200; ++seed) {
        const int32_t token = sample_one(sampler, logits, params, seed);
        CHECK(sample_one(sampler, logits, params, seed) == token);
        same += sample_one(sampler, logits, params, seed + 1000) == token ? 1 : 0;
    }
    CHECK(same < 20);
}

TEST_CASE("logits that are not finite are reported, masked tokens are not drawn") {
    constexpr int kVocab = 200;
    Sampler sampler(kVocab, kVocab);
    std::vector<float> logits = random_logits(kVocab, 1.0F, 1);
    const std::vector<int32_t> prompt = {0};
    for (const float temperature : {0.0F, 1.0F}) {
        SamplingParams params;
        params.temperature = temperature;
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity}) {
            for (const size_t place : {size_t{0}, size_t{64}, size_t{199}}) {
                std::vector<float> broken = logits;
                broken[place] = bad;
                CHECK(sampler.sample(broken, {params, 0, prompt, {}}, {}).status == SampleStatus::kNotFinite);
            }
        }
        const std::vector<float> masked(kVocab, -kInfinity);
        CHECK(sampler.sample(masked, {params, 0, prompt, {}}, {}).status == SampleStatus::kNothingAllowed);
        std::vector<float> one_left = masked;
        one_left[123] = -50.0F;
        for (uint64_t seed = 0; seed < 50; ++seed) CHECK(sample_one(sampler, one_left, params, seed) == 123);
    }
}

TEST_CASE("extreme temperatures and logits stay inside the vocabulary") {
    constexpr int kVocab = 300;
    Sampler sampler(kVocab, kVocab);
    std::vector<float> logits = random_logits(kVocab, 1e30F, 1);
    for (const float temperature : {1e-5F, 1e-3F, 1.0F, 1e6F, 3e38F}) {
        for (const float top_p : {1.0F, 0.5F, 1e-30F, 0.999999F}) {
            for (const int top_k : {0, 3, 299}) {
                SamplingParams params;
                params.temperature = temperature;
                params.top_p = top_p;
                params.top_k = top_k;
                params.min_p = 1e-30F;
                const int32_t token = sample_one(sampler, logits, params, 17);
                CHECK((token >= 0 && token < kVocab));
            }
        }
    }
}

TEST_CASE("padding of the vocabulary is never drawn nor listed, but counts in the log-softmax") {
    Sampler sampler(100, 90);
    std::vector<float> logits = random_logits(100, 1.0F, 1);
    logits[95] = 20.0F;
    for (const float temperature : {0.0F, 1.0F}) {
        SamplingParams params;
        params.temperature = temperature;
        params.logprobs = 5;
        std::vector<TokenLogprob> top(5);
        const std::vector<int32_t> prompt = {95, 3};
        params.repetition_penalty = 1.5F;
        for (uint64_t seed = 0; seed < 100; ++seed) {
            const SampledToken sampled = sampler.sample(logits, {params, seed, prompt, prompt}, top);
            CHECK(sampled.token < 90);
            CHECK(sampled.logprob < -10.0F);
            CHECK(sampled.num_top == 5);
            for (const TokenLogprob& entry : top) CHECK(entry.token < 90);
        }
    }
}

TEST_CASE("log-probabilities are the raw log-softmax in falling order, whatever the penalties") {
    constexpr int kVocab = 777;
    Sampler sampler(kVocab, kVocab);
    const std::vector<float> logits = random_logits(kVocab, 3.0F, 9);
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    std::vector<int32_t> order(kVocab);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    SamplingParams params;
    params.logprobs = 20;
    params.repetition_penalty = 1.7F;
    params.temperature = 0.5F;
    params.top_k = 30;
    std::vector<TokenLogprob> top(20);
    const std::vector<int32_t> prompt = {order[0], order[1]};
    const SampledToken sampled = sampler.sample(logits, {params, 4, prompt, {}}, top);
    // The sum of exponentials is in float within blocks of 64: relative error 1e-6, so is the log's absolute
    // one.
    const auto expected = [&](int32_t token) {
        return static_cast<double>(logits[static_cast<size_t>(token)]) - std::log(sum);
    };
    CHECK(static_cast<double>(sampled.logprob) == doctest::Approx(expected(sampled.token)).epsilon(2e-6));
    REQUIRE(sampled.num_top == 20);
    for (size_t i = 0; i < 20; ++i) {
        CHECK(top[i].token == order[i]);
        CHECK(static_cast<double>(top[i].logprob) == doctest::Approx(expected(order[i])).epsilon(2e-6));
    }
}

TEST_CASE("stop tokens cannot be drawn before min_tokens") {
    Sampler sampler(50, 50);
    std::vector<float> logits(50, 0.0F);
    logits[7] = 30.0F;
    logits[8] = 10.0F;
    SamplingParams params;
    params.temperature = 0;
    params.stop_token_ids = {7};
    params.min_tokens = 2;
    CHECK(sample_one(sampler, logits, params, 0, {1}, {}) == 8);
    CHECK(sample_one(sampler, logits, params, 0, {1}, {8}) == 8);
    CHECK(sample_one(sampler, logits, params, 0, {1}, {8, 8}) == 7);
}

TEST_CASE("parameters out of range are refused by name") {
    const auto message = [](auto change) -> std::string {
        SamplingParams params;
        change(params);
        try {
            params.validate(100);
        } catch (const std::invalid_argument& error) {
            return error.what();
        }
        return "";
    };
    const float nan = std::numeric_limits<float>::quiet_NaN();
    CHECK(message([](SamplingParams&) {}).empty());
    CHECK(message([](SamplingParams& p) { p.max_tokens = -1; }).find("max_tokens is -1") == 0);
    CHECK(message([](SamplingParams& p) { p.min_tokens = 17; }).find("min_tokens is 17") == 0);
    CHECK(message([&](SamplingParams& p) { p.temperature = nan; }).find("temperature") == 0);
    CHECK(message([&](SamplingParams& p) { p.temperature = kInfinity; }).find("temperature") == 0);
    CHECK(message([](SamplingParams& p) { p.top_k = -1; }).find("top_k") == 0);
    CHECK(message([](SamplingParams& p) { p.top_p = 0; }).find("top_p is 0") == 0);
    CHECK(message([&](SamplingParams& p) { p.top_p = nan; }).find("top_p") == 0);
    CHECK(message([](SamplingParams& p) { p.min_p = 1.5F; }).find("min_p") == 0);
    CHECK(message([](SamplingParams& p) { p.repetition_penalty = 0; }).find("repetition_penalty") == 0);
    CHECK(message([&](SamplingParams& p) { p.presence_penalty = nan; }).find("presence_penalty") == 0);
    CHECK(message([&](SamplingParams& p) { p.frequency_penalty = nan; }).find("frequency_penalty") == 0);
    CHECK(message([](SamplingParams& p) { p.logprobs = 129; }).find("logprobs") == 0);
    CHECK(message([](SamplingParams& p) {
              p.stop_token_ids = {100};
          }).find("an entry of stop_token_ids is 100") == 0);
}

TEST_CASE("top_p decays with each token to its least value, and begins again at its tokens") {
    SamplingParams params;
    params.top_p = 0.8F;
    CHECK(params.top_p_after(std::vector<int32_t>{1, 2, 3}) == 0.8F);
    params.top_p_decay = 0.5F;
    params.top_p_min = 0.15F;
    params.top_p_reset_ids = {9, 4};
    CHECK(params.top_p_after({}) == 0.8F);
    CHECK(params.top_p_after(std::vector<int32_t>{1}) == doctest::Approx(0.4));
    CHECK(params.top_p_after(std::vector<int32_t>{1, 2}) == doctest::Approx(0.2));
    CHECK(params.top_p_after(std::vector<int32_t>{1, 2, 3}) == 0.15F);
    CHECK(params.top_p_after(std::vector<int32_t>{1, 2, 3, 4}) == 0.8F);
    CHECK(params.top_p_after(std::vector<int32_t>{9, 2}) == doctest::Approx(0.4));
    CHECK(params.top_p_after(std::vector<int32_t>{9}, std::vector<int32_t>{2}) == doctest::Approx(0.4));
    CHECK(params.top_p_after(std::vector<int32_t>{1, 2}, std::vector<int32_t>{4}) == 0.8F);
}

TEST_CASE("typical sampling keeps the tokens nearest to the expected surprise") {
    std::mt19937 random(7);
    for (int round = 0; round < 200; ++round) {
        std::vector<float> weights(1 + random() % 300);
        for (float& weight : weights) {
            const bool out = random() % 4 == 0;
            weight = out ? 0.0F : std::exp(-static_cast<float>(random() % 1000) / 100.0F);
        }
        weights[0] = 1.0F;
        const float mass = 0.05F + static_cast<float>(random() % 90) / 100.0F;
        // The definition, by a full sort.
        double sum = 0;
        for (const float weight : weights) sum += static_cast<double>(weight);
        double entropy = 0;
        for (const float weight : weights) {
            const double p = static_cast<double>(weight) / sum;
            if (p > 0) entropy -= p * std::log(p);
        }
        std::vector<std::pair<double, double>> order;  // distance, probability
        for (const float weight : weights) {
            const double p = static_cast<double>(weight) / sum;
            if (p > 0) order.emplace_back(std::abs(-std::log(p) - entropy), p);
        }
        std::sort(order.begin(), order.end());
        double reached = 0;
        double farthest = 0;
        for (const auto& [distance, p] : order) {
            farthest = distance;
            reached += p;
            if (reached >= static_cast<double>(mass)) break;
        }
        TypicalFilter filter(weights.size());
        std::vector<float> kept = weights;
        const double left = filter.keep(kept, mass);
        double expected = 0;
        for (size_t i = 0; i < weights.size(); ++i) {
            const double p = static_cast<double>(weights[i]) / sum;
            // Equal weights are equally far; rounding of either computation does not matter at 1e-9.
            const bool stays = p > 0 && std::abs(-std::log(p) - entropy) <= farthest + 1e-9;
            CHECK(kept[i] == (stays ? weights[i] : 0.0F));
            expected += static_cast<double>(stays ? weights[i] : 0.0F);
        }
        CHECK(left == doctest::Approx(expected));
    }
}
