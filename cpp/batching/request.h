// One request on its way: waiting -> prefilling -> decoding -> finished; preempted, it waits again.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "batching/beam_search.h"
#include "batching/mask_rows.h"
#include "device/adapter.h"
#include "kv/beam_tables.h"
#include "kv/block_table.h"
#include "sampling/params.h"
#include "sampling/sampler.h"
#include "sampling/token_counts.h"
#include "speculation/drafter.h"

namespace castiron {

using RequestId = int64_t;

enum class RequestState : uint8_t { kWaiting, kPrefilling, kDecoding, kFinished };
enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kError };

[[nodiscard]] const char* to_string(FinishReason reason);

// Log-probabilities of consecutive tokens, each with up to `width` of the likeliest in its place.
class ScoredTokens {
public:
    ScoredTokens() = default;
    ScoredTokens(size_t count, int width);

    // Where the likeliest in the place of token i are written; it has room for `width`.
    [[nodiscard]] std::span<TokenLogprob> top_of(int i) {
        return std::span(top_).subspan(static_cast<size_t>(i) * width_, width_);
    }
    void set(int i, const SampledToken& scored) {
        logprobs_[static_cast<size_t>(i)] = scored.logprob;
        num_top_[static_cast<size_t>(i)] = scored.num_top;
    }
    [[nodiscard]] float logprob(int i) const { return logprobs_[static_cast<size_t>(i)]; }
    [[nodiscard]] std::span<const TokenLogprob> top(int i) const {
        const auto entry = static_cast<size_t>(i);
        return std::span(top_).subspan(entry * width_, static_cast<size_t>(num_top_[entry]));
    }

private:
    size_t width_ = 0;
    std::vector<float> logprobs_;
    std::vector<int> num_top_;
    std::vector<TokenLogprob> top_;
};

// What a request with a beam search has besides.
struct Beams {
    BeamSearch search;
    BeamTables tables;
};

// Everything a request will ever need is allocated in its constructor, on the caller's thread: tokens, log-
// probabilities, block table, context logits.
//
// `tokens` is the prompt followed by what was generated, `num_computed` says how many of them the KV cache
// holds. A step feeds some of the rest; when all are fed, the last row's logits give the next token. That one
// rule covers a prompt in chunks, a decode step, recomputing after a preemption and skipping a cached prefix.
// From the start of a step on its tokens count as computed, and a token that it chooses as pending: so the
// step after it can be prepared before anybody knows that token.
struct alignas(64) Request {
    // max_new_tokens: params.max_tokens, or less where the context ends. cache.priority is the request's.
    // window: of the model's attention; a beam search keeps all nevertheless.
    Request(RequestId id, std::span<const int32_t> prompt, SamplingParams params, uint64_t seed,
            int max_new_tokens, int vocab_size, const CacheUse& cache = {}, const KvWindow& window = {});

    [[nodiscard]] std::span<const int32_t> prompt() const {
        return {tokens.data(), static_cast<size_t>(prompt_tokens)};
    }
    [[nodiscard]] std::span<const int32_t> output() const {
        return {tokens.data() + prompt_tokens, static_cast<size_t>(num_output())};
    }
    [[nodiscard]] int num_tokens() const { return static_cast<int>(tokens.size()); }
    [[nodiscard]] int num_output() const { return num_tokens() - prompt_tokens; }
    [[nodiscard]] int num_pending() const { return num_tokens() + awaited_tokens - num_computed; }
    // Output tokens, with those that are being chosen.
    [[nodiscard]] int num_output_awaited() const { return num_output() + awaited_tokens; }
    [[nodiscard]] int32_t priority() const { return block_table.cache_use().priority; }
    // The most positions that it can ever have in the KV cache: the last token generated is never fed.
    [[nodiscard]] int max_cached_tokens() const { return prompt_tokens + std::max(max_new_tokens - 1, 0); }
    // Whether logits of prompt tokens are still to come, as such or for their log-probabilities.
    [[nodiscard]] bool wants_context_logits() const { return looks_at_tokens && context_rows_left > 0; }
    // Whether it goes on by one token: not if a step under way chooses its last one.
    [[nodiscard]] bool decodes() const {
        const bool ends = awaited_tokens > 0 && num_output_awaited() >= max_new_tokens;
        return state == RequestState::kDecoding && !ends;
    }
    // The tokens whose keys and values may come from the cache: not the last one, whose logits are needed,
    // and none whose logits were asked for and are not there yet.
    [[nodiscard]] std::span<const int32_t> reusable() const {
        const int most = wants_context_logits() ? prompt_tokens - context_rows_left : num_tokens();
        return {tokens.data(), static_cast<size_t>(std::min(num_tokens() - 1, most))};
    }
    // Whether it is served before the other: by priority, then in the order of arrival.
    [[nodiscard]] bool before(const Request& other) const {
        return priority() != other.priority() ? priority() < other.priority() : id < other.id;
    }
    // Whether nothing is to be done with a token that a device chooses for it but to note it.
    [[nodiscard]] bool plain() const { return !looks_at_tokens && !scores_tokens && !drafted; }
    // Whether the tokens that it has must be known before a step with it is prepared.
    [[nodiscard]] bool needs_host() const { return looks_at_tokens || drafted; }
    // A beam search; one looks at its tokens.
    [[nodiscard]] bool searches() const { return looks_at_tokens && beams != nullptr; }
    // Somebody guesses its tokens from now on.
    void draft_with(std::unique_ptr<DraftState> guesses) {
        draft_state = std::move(guesses);
        drafted = draft_state != nullptr;
    }
    // Whether the token ends it.
    [[nodiscard]] bool stops_at(int32_t token) const {
        return num_stops > 0 && (token == first_stop || (num_stops > 1 && params.stops_at(token)));
    }
    // The KV blocks of its first `positions` positions.
    [[nodiscard]] std::span<const int32_t> blocks_of(int positions) const {
        return {places, static_cast<size_t>(blocks_for_tokens(positions))};
    }
    // The window blocks of them, where some layers have a window.
    [[nodiscard]] std::span<const int32_t> windows_of(int positions) const {
        return block_table.windows().blocks().first(static_cast<size_t>(blocks_for_tokens(positions)));
    }
    // Whether a mask from outside decides which tokens may come.
    [[nodiscard]] bool constrained() const { return !params.first_mask.empty(); }

    // Sequences of it that a step may run.
    [[nodiscard]] int width() const { return searches() ? params.beam_width : 1; }
    // Output tokens that may be told: those of a beam search are known at its end.
    [[nodiscard]] int num_public() const { return searches() ? 0 : num_output(); }
    // Output tokens of all texts that a beam search found.
    [[nodiscard]] int num_found() const;
    // A step begins to run it, perhaps not for the first time.
    void note_start();
    // Something of it is about to be published: its first token, or its end.
    void note_news();
    // Gives all KV blocks and promises back.
    void give_back(BlockPool& pool);

    // Every live beam has its continuations: makes `tokens` those of the best, or ends the request.
    void advance_beams();
    // Adds a sampled token with its log-probabilities, or ends the request: kStop when the token is a stop
    // token (which is reported apart, not added), kLength when it was the last that fits.
    void append(const SampledToken& sampled);
    // The same for a token without log-probabilities that no penalty counts.
    void append(int32_t token) {
        if (stops_at(token)) {
            stop_token = token;
            return finish(FinishReason::kStop);
        }
        tokens.push_back(token);
        latest_token = token;
        state = RequestState::kDecoding;
        if (num_output() >= max_new_tokens) finish(FinishReason::kLength);
    }
    void finish(FinishReason reason, std::string message = {});

    // What every step reads and writes comes first, in two cache lines, and a step of plain requests looks at
    // little else: with thousands of requests running, fetching what they need is most of what a step costs.
    std::vector<int32_t> tokens;
    const int prompt_tokens;
    const int max_new_tokens;
    int32_t latest_token;  // tokens.back()
    int num_computed = 0;
    int awaited_tokens = 0;  // that steps under way choose
    int awaited_row = -1;    // of the logits of the last of these steps: where its token is chosen
    // What the engine thread has made visible to poll().
    int published = 0;     // output tokens
    int outbox_entry = 0;  // of the outbox, if that is the request's
    RequestState state = RequestState::kWaiting;
    FinishReason finish_reason = FinishReason::kNone;
    bool published_context = false;
    bool published_finish = false;
    const bool looks_at_tokens;  // masks, rules, penalties and the like decide with the model
    const bool scores_tokens;    // log-probabilities of its tokens are wanted
    const uint8_t num_stops;     // stop tokens: none, one or more
    bool drafted = false;        // somebody guesses its tokens

    RowSampling row_sampling;                // how a device chooses its tokens, but for the random number
    const int32_t first_stop;                // one of the stop tokens
    const int32_t* places = nullptr;         // block_table.blocks().data(), which stays
    std::shared_ptr<const Adapter> adapter;  // or none; it lives until the request is gone

    BlockTable block_table;

    const SamplingParams params;
    std::unique_ptr<Beams> beams;             // of a beam search; block_table is the prompt's then
    std::vector<int32_t> drafts;              // guesses of the next tokens that this step checks
    std::unique_ptr<DraftState> draft_state;  // none: nobody guesses for this request
    int most_computed = 0;                    // before a preemption took it away
    int context_rows_left = 0;                // prompt tokens whose logits are wanted and still to come
    MaskRows masks;                           // of the tokens that the step chooses, while it does
    std::span<const float> changed_logits;    // what a processor made of the row, while the step chooses
    TokenCounts seen;                         // what penalties look at; empty without any
    const uint64_t seed;
    const RequestId id;
    int cached_tokens = 0;  // prompt tokens that came from the cache; fixed once there is news
    const std::chrono::steady_clock::time_point arrived = std::chrono::steady_clock::now();
    float queue_seconds = -1;        // from there to its first step, -1: not yet; fixed once there is news
    float first_token_seconds = -1;  // from there to its first token, -1: none yet
    float seconds = -1;              // from there to its end, -1: not yet
    int preemptions = 0;
    int32_t stop_token = -1;  // the stop token that ended it
    std::string error;

    ScoredTokens output_scores;  // one more than the output: a stop token is sampled before it is known
    ScoredTokens prompt_scores;  // entry i is of prompt token i + 1
    std::shared_ptr<float[]> context_logits;     // [prompt_tokens, vocab_size]
    std::shared_ptr<float[]> generation_logits;  // [max_new_tokens, vocab_size]

    bool cancel_requested = false;  // guarded by the engine's mutex
    size_t queue_place = 0;         // in the RequestQueue, while it waits
};

// Requests that wait, in the order in which they are served: a binary heap, with removal from the middle.
class RequestQueue {
public:
    // Allocates for `capacity` requests; more of them cost an allocation.
    explicit RequestQueue(size_t capacity) { heap_.reserve(capacity); }

    [[nodiscard]] bool empty() const { return heap_.empty(); }
    [[nodiscard]] int size() const { return static_cast<int>(heap_.size()); }
    [[nodiscard]] Request* front() const { return heap_.front(); }
    // Prompt and output tokens of all of them.
    [[nodiscard]] int64_t num_tokens() const { return num_tokens_; }
    void push(Request& request);
    void remove(Request& request);
    void clear();

private:
    void put(size_t place, Request* request);
    void sift_up(size_t place);
    void sift_down(size_t place);

    std::vector<Request*> heap_;
    int64_t num_tokens_ = 0;
};

}  // namespace castiron
