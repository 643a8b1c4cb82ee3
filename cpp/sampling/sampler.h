// From a row of logits to a token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampling/params.h"
#include "sampling/row_math.h"
#include "sampling/typical.h"

namespace castiron {

struct TokenLogprob {
    int32_t token = 0;
    float logprob = 0;
};

enum class SampleStatus : uint8_t {
    kOk,
    kNotFinite,       // the logits hold NaN or +infinity
    kNothingAllowed,  // every token is masked
};

struct SampledToken {
    SampleStatus status = SampleStatus::kOk;
    int32_t token = -1;
    float logprob = 0;  // only if params.logprobs >= 0
    int num_top = 0;    // entries written to `top`
};

// What a request brings to the choice of its next token.
struct SamplingContext {
    const SamplingParams& params;
    uint64_t seed;
    std::span<const int32_t> prompt;
    std::span<const int32_t> output;   // generated so far
    std::span<const uint32_t> mask{};  // bits of the tokens that a grammar allows; empty: all
    std::span<const float> changed{};  // [vocab_size] to choose from instead of the row; empty: the row
};

// Chooses tokens, from the logits or from what a processor of the request's made of them. The order of
// processing is vLLM's, its filters in the order of transformers:
//
//   1. what a grammar or the request's rules forbid is masked, logit_bias is added; stop tokens are masked
//   while
//      fewer than min_tokens were generated
//   2. repetition penalty over prompt and output (x > 0 ? x / p : x * p), then frequency and presence penalty
//   over
//      the output (x - f * count - p)
//   3. greedy: the largest; of equal ones that with the lowest id
//   4. otherwise / temperature, top-k, top-p (the smallest set of mass >= top_p, at least one token), min-p
//   (at
//      least min_p times the largest), typical_p (typical.h), and one draw, by a number that depends on
//      (seed, position) alone
//
// Log-probabilities are of the raw logits, before any of this: log-softmax over the whole vocabulary. Tokens
// from vocab_limit on (rows that pad the vocabulary) are neither drawn nor listed. Holds scratch space for
// one row and allocates nothing afterwards; one thread at a time.
class Sampler {
public:
    Sampler(int vocab_size, int vocab_limit);
    Sampler(const Sampler&) = delete;
    Sampler& operator=(const Sampler&) = delete;

    // logits: [vocab_size]. The params.logprobs likeliest tokens go to `top`, likeliest first.
    [[nodiscard]] SampledToken sample(std::span<const float> logits, const SamplingContext& context,
                                      std::span<TokenLogprob> top);
    // The out.size() likeliest next tokens, likeliest first, for a beam search: their log-softmax, after
    // rules, the mask of stop tokens and penalties, in the order of 1. and 2. above, as transformers has it.
    // num_top says how many there are.
    [[nodiscard]] SampledToken continuations(std::span<const float> logits, const SamplingContext& context,
                                             std::span<TokenLogprob> out);
    // The log-probability of a token that is known, and the top.size() likeliest in its place.
    [[nodiscard]] SampledToken score(std::span<const float> logits, int32_t token,
                                     std::span<TokenLogprob> top);

private:
    struct Candidate {
        float value;
        int32_t id;
    };

    [[nodiscard]] bool changes(const SamplingContext& context) const;
    void apply_changes(const SamplingContext& context);
    void apply_penalties(const SamplingContext& context);
    // No NaN, and a largest logit to compare the others with.
    [[nodiscard]] bool has_finite_max(std::span<const float> logits);
    [[nodiscard]] double log_sum_exp(std::span<const float> logits);
    void mask_stop_tokens(const SamplingParams& params);
    void select_top(std::span<const float> row, size_t count);
    [[nodiscard]] int32_t draw_from_top_k(std::span<const float> row, const SamplingParams& params,
                                          float top_p, double uniform);
    [[nodiscard]] int32_t draw_from_row(std::span<const float> row, float max, const SamplingParams& params,
                                        float top_p, double uniform);
    [[nodiscard]] double keep_typical(size_t count, float typical_p);
    [[nodiscard]] row_math::Cut top_p_cut(double mass, float top_p);
    int write_logprobs(std::span<const float> logits, int32_t token, float& logprob,
                       std::span<TokenLogprob> top);

    size_t vocab_size_;
    size_t vocab_limit_;
    std::vector<float> row_;        // [vocab_limit] logits after penalties
    std::vector<float> block_max_;  // of the row that is being sampled from
    std::vector<float> block_scratch_;
    std::vector<float> weight_values_;
    std::vector<float> block_mass_;
    std::vector<float> block_peak_;
    row_math::Weights weights_;    // of the three above
    std::vector<int32_t> counts_;  // [vocab_limit], all zero between calls
    std::vector<Candidate> candidates_;
    TypicalFilter typical_;
};

}  // namespace castiron
