// How the tokens of one request are chosen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sampling/token_rules.h"

namespace castiron {

// Most top log-probabilities that a request may ask for per token.
inline constexpr int kMaxLogprobs = 128;
// Below this temperature sampling is greedy: dividing by it would only overflow.
inline constexpr float kGreedyTemperature = 1e-5F;

// When a beam search with beam_width finished texts ends; transformers' `early_stopping`.
enum class EarlyStopping : uint8_t {
    kNever,          // when no live beam can do better, whatever length it reaches ("never")
    kLikely,         // when none would do better with the length that it has (False)
    kFirstFinished,  // at once (True)
};

struct SamplingParams {
    std::vector<int32_t> stop_token_ids;   // first, for what looks at nothing else
    int max_tokens = 16;                   // 0: prefill only
    int min_tokens = 0;                    // no stop token before so many
    float temperature = 1.0F;              // 0: greedy
    int top_k = 0;                         // 0: off
    float top_p = 1.0F;                    // 1: off
    float top_p_decay = 1.0F;              // 1: off; each token makes top_p so many times what it was,
    float top_p_min = 1e-6F;               // but not less than this;
    std::vector<int32_t> top_p_reset_ids;  // one of these makes it what it was in the beginning
    float min_p = 0.0F;                    // 0: off
    float typical_p = 1.0F;                // 1: off
    float repetition_penalty = 1.0F;       // 1: off; over prompt and output, as transformers has it
    float presence_penalty = 0.0F;         // 0: off; over the output, as OpenAI has it
    float frequency_penalty = 0.0F;        // 0: off; over the output, per occurrence
    std::optional<uint64_t> seed;          // none: a random one
    TokenRules rules;
    // Bits of the tokens that may come first; empty unless a grammar constrains the output (mask_exchange.h).
    std::vector<uint32_t> first_mask;
    int logprobs = -1;         // -1: none; else how many of the likeliest besides the chosen token's
    int prompt_logprobs = -1;  // the same of every prompt token but the first, which nothing predicts
    // Somebody outside changes each row of logits before the choice (logits_exchange.h).
    bool process_logits = false;
    bool context_logits = false;  // logits of every prompt token are wanted
    int beam_width = 0;           // 0: tokens are sampled; else the best texts are searched for
    float length_penalty = 1.0F;  // of a beam search: a text's score is its sum / length^length_penalty
    EarlyStopping early_stopping = EarlyStopping::kLikely;
    bool generation_logits = false;   // raw logits that each new token was chosen from are wanted
    int num_speculative_tokens = -1;  // guesses of the next tokens in a step; -1: as many as the engine says

    [[nodiscard]] bool greedy() const { return temperature < kGreedyTemperature; }
    [[nodiscard]] bool has_penalties() const {
        return repetition_penalty != 1.0F || presence_penalty != 0.0F || frequency_penalty != 0.0F;
    }
    [[nodiscard]] bool stops_at(int32_t token) const {
        return std::find(stop_token_ids.begin(), stop_token_ids.end(), token) != stop_token_ids.end();
    }
    // top_p of the token after `output` and, if they are right, drafts behind it.
    [[nodiscard]] float top_p_after(std::span<const int32_t> output,
                                    std::span<const int32_t> drafts = {}) const;
    // Throws std::invalid_argument naming the field, what it is and what it may be.
    void validate(int vocab_size) const;

private:
    void validate_beams(int vocab_size) const;
};

}  // namespace castiron
