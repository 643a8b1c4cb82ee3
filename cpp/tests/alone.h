// What a request says alone, straight from the definition: no batches, no chunks, no cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "batching/request.h"
#include "sampling/sampler.h"
#include "tests/fake_device.h"

namespace castiron::testing {

struct Alone {
    std::vector<int32_t> tokens;
    FinishReason reason = FinishReason::kLength;
    int32_t stop_token = -1;
};

// On the fake device.
inline Alone alone(int vocab_size, std::span<const int32_t> prompt, const SamplingParams& params,
                   uint64_t seed, int max_new_tokens) {
    Sampler sampler(vocab_size, vocab_size);
    std::vector<int32_t> history(prompt.begin(), prompt.end());
    std::vector<float> logits(static_cast<size_t>(vocab_size));
    Alone said;
    while (static_cast<int>(said.tokens.size()) < max_new_tokens) {
        hashed_logits(history, logits);
        const int32_t token = sampler.sample(logits, {params, seed, prompt, said.tokens}, {}).token;
        const auto& stops = params.stop_token_ids;
        if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
            said.reason = FinishReason::kStop;
            said.stop_token = token;
            break;
        }
        said.tokens.push_back(token);
        history.push_back(token);
    }
    return said;
}

}  // namespace castiron::testing
