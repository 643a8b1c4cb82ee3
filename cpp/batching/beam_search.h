// Which continuations of a prompt a beam search keeps. No KV blocks here: kv/beam_tables.h has those.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampling/params.h"
#include "sampling/sampler.h"

namespace castiron {

// One text that a beam search found.
struct BeamOutput {
    std::vector<int32_t> token_ids;  // without the stop token that ended it
    std::vector<float> logprobs;     // of each of them, after penalties, rules and bias
    double cumulative_logprob = 0;   // the sum, the stop token's among it
    double score = 0;                // cumulative_logprob / length^length_penalty; the stop token counts
    int32_t stop_token_id = -1;      // -1: it has max_new_tokens tokens
};

// The search of transformers' generate(num_beams=k), for one prompt:
//
// All continuations of all live beams are ranked by the sum of their log-probabilities. Those among the k
// best that end, by a stop token or the last place, are finished texts, of which the k of the highest score
// are kept; the k best that do not end are the next live beams. The search ends when k texts are finished and
// no live beam is expected to do better (EarlyStopping says what is expected), or at max_new_tokens.
//
// All memory is taken by the constructor.
class BeamSearch {
public:
    // params.beam_width >= 1.
    BeamSearch(const SamplingParams& params, int max_new_tokens);

    // Live beams; one, which has no token yet, in the beginning.
    [[nodiscard]] int num_live() const { return num_live_; }
    // Tokens that each live beam has.
    [[nodiscard]] int length() const { return length_; }
    // Best beam first.
    [[nodiscard]] std::span<const int32_t> output(int beam) const {
        return live_of(beam).tokens_so_far(length_);
    }
    // Continuations of each beam that choose() has to know: enough of them do not end.
    [[nodiscard]] int num_wanted() const { return wanted_; }
    // Where the likeliest next tokens of a live beam are written, likeliest first; room for num_wanted().
    [[nodiscard]] std::span<TokenLogprob> continuations(int beam) {
        return std::span(offers_).subspan(static_cast<size_t>(beam * wanted_), static_cast<size_t>(wanted_));
    }
    void set_num_continuations(int beam, int count) { num_offers_[static_cast<size_t>(beam)] = count; }

    // All live beams have their continuations: each gets one token more. False when the search has ended.
    [[nodiscard]] bool choose();
    // parents()[b] is the beam, before choose(), that live beam b continues.
    [[nodiscard]] std::span<const int> parents() const {
        return std::span(parents_).first(static_cast<size_t>(num_live_));
    }
    // The finished texts, best first; beam_width of them unless the rules left fewer.
    [[nodiscard]] std::vector<BeamOutput> results() const;
    [[nodiscard]] int num_finished() const { return num_finished_; }
    // Tokens of all of them.
    [[nodiscard]] int num_found_tokens() const;
    // The stop token of the best text, -1 where it has none.
    [[nodiscard]] int32_t best_stop_token() const { return finished_.front().stop_token; }

private:
    struct Text {
        std::vector<int32_t> tokens;  // [max_new_tokens]
        std::vector<float> logprobs;  // [max_new_tokens]
        double sum = 0;
        // Of finished ones.
        double score = 0;
        int length = 0;
        int32_t stop_token = -1;

        [[nodiscard]] std::span<const int32_t> tokens_so_far(int count) const {
            return std::span(tokens).first(static_cast<size_t>(count));
        }
    };
    struct Candidate {
        double sum = 0;
        float logprob = 0;
        int32_t token = 0;
        int parent = 0;
    };

    [[nodiscard]] const Text& live_of(int beam) const { return live_[static_cast<size_t>(beam)]; }
    void rank_candidates();
    void extend(Text& text, const Candidate& candidate) const;
    void finish(const Candidate& candidate);
    [[nodiscard]] bool can_improve() const;
    [[nodiscard]] double score_of(double sum, int length) const;

    const SamplingParams& params_;
    const size_t width_;
    const int max_new_tokens_;
    int wanted_ = 0;
    int num_live_ = 1;
    int length_ = 0;
    int num_finished_ = 0;
    std::vector<Text> live_;
    std::vector<Text> next_;
    std::vector<Text> finished_;  // best first; one more than width_, which is where the next is written
    std::vector<int> parents_;
    std::vector<TokenLogprob> offers_;  // [width, wanted]
    std::vector<int> num_offers_;
    std::vector<Candidate> candidates_;
};

}  // namespace castiron
