#include "batching/event.h"

#include <algorithm>

namespace castiron {

namespace {

void add_logprobs(std::vector<TokenLogprobs>& entries, const ScoredTokens& scores, const int32_t* tokens,
                  int from, int to) {
    entries.reserve(static_cast<size_t>(to - from));
    for (int i = from; i < to; ++i) {
        const auto top = scores.top(i);
        entries.push_back({tokens[i], scores.logprob(i), {top.begin(), top.end()}});
    }
}

}  // namespace

Event make_event(const Request& request, int from, int to, bool context, bool finished) {
    Event event;
    event.request_id = request.id;
    event.prompt_tokens = request.prompt_tokens;
    event.cached_tokens = request.cached_tokens;
    event.queue_seconds = std::max(request.queue_seconds, 0.0F);
    // data() and not end(): the engine thread may be adding tokens behind `to` at this moment.
    const int32_t* output = request.tokens.data() + request.prompt_tokens;
    event.token_ids.assign(output + from, output + to);
    if (request.params.logprobs >= 0) add_logprobs(event.logprobs, request.output_scores, output, from, to);
    if (context && request.params.prompt_logprobs >= 0) {
        add_logprobs(event.prompt_logprobs, request.prompt_scores, request.tokens.data() + 1, 0,
                     request.prompt_tokens - 1);
    }
    if (context) event.context_logits = request.context_logits;
    if (finished) {
        event.finished = true;
        event.first_token_seconds = std::max(request.first_token_seconds, 0.0F);
        event.seconds = std::max(request.seconds, 0.0F);
        event.finish_reason = request.finish_reason;
        event.stop_token_id = request.stop_token;
        event.error = request.error;
        event.generation_logits = request.generation_logits;
        event.num_output = to;
        const bool found =
            request.finish_reason == FinishReason::kStop || request.finish_reason == FinishReason::kLength;
        if (found && request.beams != nullptr) event.beams = request.beams->search.results();
    }
    return event;
}

}  // namespace castiron
