#include "batching/event.h"

namespace castiron {

Event make_event(const Request& request, int from, int to, bool finished) {
    Event event;
    event.request_id = request.id;
    event.prompt_tokens = request.prompt_tokens;
    event.cached_tokens = request.cached_tokens;
    // data() and not end(): the engine thread may be adding tokens behind `to` at this moment.
    const int32_t* output = request.tokens.data() + request.prompt_tokens;
    event.token_ids.assign(output + from, output + to);
    if (request.params.logprobs >= 0) {
        event.logprobs.reserve(event.token_ids.size());
        for (int i = from; i < to; ++i) {
            const auto index = static_cast<size_t>(i);
            const TokenLogprob* top =
                request.top_logprobs.data() + index * static_cast<size_t>(request.params.logprobs);
            event.logprobs.push_back(
                {output[i], request.logprobs[index], {top, top + request.num_top[index]}});
        }
    }
    if (finished) {
        event.finished = true;
        event.finish_reason = request.finish_reason;
        event.stop_token_id = request.stop_token;
        event.error = request.error;
    }
    return event;
}

}  // namespace castiron
