// One request on its way: waiting -> prefilling -> decoding -> finished.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv/block_table.h"
#include "sampling/params.h"
#include "sampling/sampler.h"
#include "sampling/token_counts.h"

namespace castiron {

using RequestId = int64_t;

enum class RequestState : uint8_t { kWaiting, kPrefilling, kDecoding, kFinished };
enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kError };

[[nodiscard]] const char* to_string(FinishReason reason);

// Everything a request will ever need is allocated in its constructor, on the caller's thread: tokens, log-
// probabilities, block table, context logits.
//
// `tokens` is the prompt followed by what was generated, `num_computed` says how many of them the KV cache
// holds. A step feeds some of the rest; when all are fed, the last row's logits give the next token. That one
// rule covers a prompt in chunks, a decode step, and (later) recomputing after a preemption or skipping a
// cached prefix.
struct Request {
    // max_new_tokens: params.max_tokens, or less where the context ends.
    Request(RequestId id, std::span<const int32_t> prompt, SamplingParams params, uint64_t seed,
            int max_new_tokens, int vocab_size);

    [[nodiscard]] std::span<const int32_t> prompt() const {
        return {tokens.data(), static_cast<size_t>(prompt_tokens)};
    }
    [[nodiscard]] std::span<const int32_t> output() const {
        return {tokens.data() + prompt_tokens, static_cast<size_t>(num_output())};
    }
    [[nodiscard]] int num_tokens() const { return static_cast<int>(tokens.size()); }
    [[nodiscard]] int num_output() const { return num_tokens() - prompt_tokens; }
    [[nodiscard]] int num_pending() const { return num_tokens() - num_computed; }

    // Adds a sampled token with its log-probabilities, or ends the request: kStop when the token is a stop
    // token (which is reported apart, not added), kLength when it was the last that fits.
    void append(const SampledToken& sampled);
    void finish(FinishReason reason, std::string message = {});

    const RequestId id;
    const SamplingParams params;
    const uint64_t seed;
    const int prompt_tokens;
    const int max_new_tokens;

    RequestState state = RequestState::kWaiting;
    FinishReason finish_reason = FinishReason::kNone;
    int32_t stop_token = -1;  // the stop token that ended it
    std::string error;

    std::vector<int32_t> tokens;
    int num_computed = 0;
    BlockTable block_table;
    TokenCounts seen;  // what penalties look at; empty without any

    // Logprobs of output token i: logprobs[i], and num_top[i] entries from top_logprobs[i * params.logprobs].
    // top_logprobs has room for one more than the output, because a stop token is sampled before it is known.
    std::vector<float> logprobs;
    std::vector<int> num_top;
    std::vector<TokenLogprob> top_logprobs;
    std::shared_ptr<float[]> context_logits;  // [prompt_tokens, vocab_size]

    bool cancel_requested = false;  // guarded by the engine's mutex

    // What the engine thread has made visible to poll().
    int published = 0;  // output tokens
    bool published_context = false;
    bool published_finish = false;
    int64_t outbox_round = -1;  // the outbox of this round has an entry for the request,
    size_t outbox_entry = 0;    // this one

    // Links of the RequestQueue it is in.
    Request* previous = nullptr;
    Request* next = nullptr;
};

// First in, first out, with removal from the middle; never allocates.
class RequestQueue {
public:
    [[nodiscard]] bool empty() const { return first_ == nullptr; }
    [[nodiscard]] int size() const { return size_; }
    [[nodiscard]] Request* front() const { return first_; }
    void push_back(Request& request);
    void remove(Request& request);

private:
    Request* first_ = nullptr;
    Request* last_ = nullptr;
    int size_ = 0;
};

}  // namespace castiron
