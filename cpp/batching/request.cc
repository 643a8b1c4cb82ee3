#include "batching/request.h"

#include <algorithm>
#include <utility>

namespace castiron {

const char* to_string(FinishReason reason) {
    switch (reason) {
        case FinishReason::kNone:
            return "";
        case FinishReason::kStop:
            return "stop";
        case FinishReason::kLength:
            return "length";
        case FinishReason::kCancelled:
            return "cancelled";
        case FinishReason::kError:
            return "error";
    }
    return "";
}

Request::Request(RequestId request_id, std::span<const int32_t> prompt_ids, SamplingParams sampling_params,
                 uint64_t sampling_seed, int new_tokens, int vocab_size)
    : id(request_id),
      params(std::move(sampling_params)),
      seed(sampling_seed),
      prompt_tokens(static_cast<int>(prompt_ids.size())),
      max_new_tokens(new_tokens),
      // The last token generated is never fed, so it needs no place in the cache.
      block_table(prompt_tokens + std::max(new_tokens - 1, 0)) {
    const auto room = static_cast<size_t>(max_new_tokens);
    tokens.reserve(prompt_ids.size() + room);
    tokens.assign(prompt_ids.begin(), prompt_ids.end());
    if (params.logprobs >= 0) {
        logprobs.resize(room);
        num_top.resize(room);
        top_logprobs.resize((room + 1) * static_cast<size_t>(params.logprobs));
    }
    if (params.has_penalties()) {
        seen = TokenCounts(prompt_ids.size() + room);
        // The prompt counts for the repetition penalty alone.
        if (params.repetition_penalty != 1.0F) {
            for (const int32_t token : prompt_ids) seen.note(token, false);
        }
    }
    if (params.context_logits) {
        context_logits =
            std::make_shared_for_overwrite<float[]>(prompt_ids.size() * static_cast<size_t>(vocab_size));
    }
}

void Request::append(const SampledToken& sampled) {
    const auto& stops = params.stop_token_ids;
    if (std::find(stops.begin(), stops.end(), sampled.token) != stops.end()) {
        stop_token = sampled.token;
        return finish(FinishReason::kStop);
    }
    if (params.logprobs >= 0) {
        logprobs[static_cast<size_t>(num_output())] = sampled.logprob;
        num_top[static_cast<size_t>(num_output())] = sampled.num_top;
    }
    tokens.push_back(sampled.token);
    if (params.has_penalties()) seen.note(sampled.token, true);
    state = RequestState::kDecoding;
    if (num_output() >= max_new_tokens) finish(FinishReason::kLength);
}

void Request::finish(FinishReason reason, std::string message) {
    state = RequestState::kFinished;
    finish_reason = reason;
    error = std::move(message);
}

void RequestQueue::push_back(Request& request) {
    request.previous = last_;
    request.next = nullptr;
    (last_ != nullptr ? last_->next : first_) = &request;
    last_ = &request;
    ++size_;
}

void RequestQueue::remove(Request& request) {
    (request.previous != nullptr ? request.previous->next : first_) = request.next;
    (request.next != nullptr ? request.next->previous : last_) = request.previous;
    request.previous = request.next = nullptr;
    --size_;
}

}  // namespace castiron
