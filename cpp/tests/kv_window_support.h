// What tests of the two ways to keep a window of the past have in common.
#pragma once

#include <cstddef>
#include <map>
#include <random>
#include <vector>

#include "tests/engine_support.h"

namespace castiron::testing {

inline std::vector<int32_t> counting(int count) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 7 % 61);
    return tokens;
}

// Prompts of several lengths with long outputs: each says what it says alone, and nobody is set back.
// seen: what a token sees of its past in the end; 0: all.
inline EngineStats say_long_outputs(Engine& engine, int seen = 0) {
    std::mt19937 random(5);
    std::map<RequestId, std::vector<int32_t>> prompts;
    for (const int length : {1, 40, 150, 700}) {
        const auto prompt = random_prompt(random, length);
        prompts[engine.submit(prompt, greedy(1200))] = prompt;
    }
    Outcomes outcomes;
    finish_all(engine, outcomes, prompts.size());
    for (const auto& [id, prompt] : prompts) {
        CHECK(outcomes.at(id).tokens == alone(kVocab, prompt, greedy(1200), 0, 1200, 0, seen).tokens);
    }
    const EngineStats stats = idle_stats(engine);
    CHECK(stats.kv_integrity_error == "");
    CHECK(stats.preemptions == 0);
    return stats;
}

}  // namespace castiron::testing
