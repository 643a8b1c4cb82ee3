// Time per row of the sampler: sampler_bench [vocabulary size]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "sampling/sampler.h"

namespace {

using castiron::SamplingParams;

// Logits like a language model's: normal noise, and a few tokens far above it.
std::vector<float> peaked_logits(size_t vocab, float spread, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> noise(0.0F, spread);
    std::vector<float> logits(vocab);
    for (float& logit : logits) logit = noise(random);
    for (int i = 0; i < 20; ++i) logits[random() % vocab] += 8.0F + static_cast<float>(i) * 0.3F;
    return logits;
}

// Median time of one call in microseconds, over `rows` different rows that do not fit into the cache
// together.
double median_us(const std::vector<std::vector<float>>& rows, const SamplingParams& params) {
    const size_t vocab = rows[0].size();
    castiron::Sampler sampler(static_cast<int>(vocab), static_cast<int>(vocab));
    std::vector<castiron::TokenLogprob> top(static_cast<size_t>(std::max(params.logprobs, 0)));
    std::vector<int32_t> history(512);
    for (size_t i = 0; i < history.size(); ++i) history[i] = static_cast<int32_t>(i * 37 % vocab);
    std::vector<double> times;
    int64_t sum = 0;
    for (uint64_t repeat = 0; repeat < 301; ++repeat) {
        const auto& row = rows[repeat % rows.size()];
        const auto begin = std::chrono::steady_clock::now();
        sum += sampler.sample(row, {params, repeat, history, history}, top).token;
        const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
        times.push_back(time.count());
    }
    std::nth_element(times.begin(), times.begin() + 150, times.end());
    if (sum < 0) std::abort();
    return times[150];
}

}  // namespace

int main(int argc, char** argv) {
    const size_t vocab = argc > 1 ? static_cast<size_t>(std::atol(argv[1])) : 49152;
    for (const float spread : {1.0F, 2.5F}) {
        std::vector<std::vector<float>> rows;
        for (uint32_t seed = 0; seed < 16; ++seed) rows.push_back(peaked_logits(vocab, spread, seed));
        const auto report = [&](const char* name, auto change) {
            SamplingParams params;
            change(params);
            std::printf("vocab %zu, spread %.1f: %-28s %8.1f us\n", vocab, static_cast<double>(spread), name,
                        median_us(rows, params));
        };
        report("greedy", [](SamplingParams& p) { p.temperature = 0; });
        report("greedy + penalties",
               [](SamplingParams& p) { p.temperature = 0, p.repetition_penalty = 1.1F; });
        report("greedy + 5 logprobs", [](SamplingParams& p) { p.temperature = 0, p.logprobs = 5; });
        report("temperature", [](SamplingParams&) {});
        report("top-k 50", [](SamplingParams& p) { p.top_k = 50; });
        report("top-k 50, top-p 0.9", [](SamplingParams& p) { p.top_k = 50, p.top_p = 0.9F; });
        report("top-p 0.9", [](SamplingParams& p) { p.top_p = 0.9F; });
        report("top-p 0.99", [](SamplingParams& p) { p.top_p = 0.99F; });
        report("min-p 0.05", [](SamplingParams& p) { p.min_p = 0.05F; });
        report("top-k 2000", [](SamplingParams& p) { p.top_k = 2000; });
    }
    return 0;
}
