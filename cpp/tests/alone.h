// What a request says alone, straight from the definition: no batches, no chunks, no cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "batching/request.h"
#include "sampling/sampler.h"
#include "tests/fake_device.h"
#include "tests/toy_grammar.h"

namespace castiron::testing {

struct Alone {
    std::vector<int32_t> tokens;
    FinishReason reason = FinishReason::kLength;
    int32_t stop_token = -1;
};

// On the fake device; with a first mask, in the toy grammar. shift: that of the request's adapter. window:
// the device's.
inline Alone alone(int vocab_size, std::span<const int32_t> prompt, const SamplingParams& params,
                   uint64_t seed, int max_new_tokens, int32_t shift = 0, int window = 0) {
    Sampler sampler(vocab_size, vocab_size);
    std::vector<int32_t> history = shifted(prompt, shift);
    std::vector<float> logits(static_cast<size_t>(vocab_size));
    Alone said;
    while (static_cast<int>(said.tokens.size()) < max_new_tokens) {
        hashed_logits(in_window(history, window), logits);
        const uint32_t mask = toy_grammar(said.tokens);
        const std::span<const uint32_t> masked(&mask, params.first_mask.empty() ? 0 : 1);
        const int32_t token = sampler.sample(logits, {params, seed, prompt, said.tokens, masked}, {}).token;
        const auto& stops = params.stop_token_ids;
        if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
            said.reason = FinishReason::kStop;
            said.stop_token = token;
            break;
        }
        said.tokens.push_back(token);
        history.push_back(token + shift);
    }
    return said;
}

// The texts that a beam search finds alone.
inline std::vector<BeamOutput> alone_beams(int vocab_size, std::span<const int32_t> prompt,
                                           const SamplingParams& params, uint64_t seed, int max_new_tokens,
                                           int32_t shift, int window = 0) {
    Sampler sampler(vocab_size, vocab_size);
    BeamSearch search(params, max_new_tokens);
    std::vector<float> logits(static_cast<size_t>(vocab_size));
    do {
        for (int beam = 0; beam < search.num_live(); ++beam) {
            const auto output = search.output(beam);
            std::vector<int32_t> history(prompt.begin(), prompt.end());
            history.insert(history.end(), output.begin(), output.end());
            hashed_logits(shifted(in_window(history, window), shift), logits);
            const SampledToken found =
                sampler.continuations(logits, {params, seed, prompt, output}, search.continuations(beam));
            search.set_num_continuations(beam, found.num_top);
        }
    } while (search.choose());
    return search.results();
}

}  // namespace castiron::testing
