// What the engine tells its caller about a request.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "batching/request.h"

namespace castiron {

struct TokenLogprobs {
    int32_t token = 0;
    float logprob = 0;              // raw log-softmax, before penalties and temperature
    std::vector<TokenLogprob> top;  // likeliest first
};

// All that happened to one request since the last poll, over one or more steps.
struct Event {
    RequestId request_id = 0;
    std::vector<int32_t> token_ids;       // new tokens; a stop token is not among them
    std::vector<TokenLogprobs> logprobs;  // one per token, if asked for
    bool finished = false;                // nothing comes after this event
    FinishReason finish_reason = FinishReason::kNone;
    int32_t stop_token_id = -1;  // the stop token that ended the request, or -1
    std::string error;           // with kError
    int prompt_tokens = 0;
    // Of prompt tokens 1, 2, ..., once, if asked for.
    std::vector<TokenLogprobs> prompt_logprobs;
    int cached_tokens = 0;    // of them taken from the cache instead of computed
    float queue_seconds = 0;  // that the request waited for its first step
    // From the request's arrival to its first token and to its end, with the end; 0: there was none.
    float first_token_seconds = 0;
    float seconds = 0;
    int vocab_size = 0;
    std::shared_ptr<float[]> context_logits;     // [prompt_tokens, vocab_size], once, if asked for
    std::shared_ptr<float[]> generation_logits;  // [num_output, vocab_size], with the end, if asked for
    int num_output = 0;
    std::vector<BeamOutput> beams;  // what a beam search found, best first, with its end
};

// The request's news from output token `from` to `to`, with what was wanted of its prompt if `context`, and
// with its end if `finished`.
[[nodiscard]] Event make_event(const Request& request, int from, int to, bool context, bool finished);

}  // namespace castiron
