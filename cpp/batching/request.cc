#include "batching/request.h"

#include <algorithm>
#include <utility>

#include "batching/sampling_plan.h"

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

namespace {

bool depends_on_tokens(const SamplingParams& params) {
    const bool masked = params.min_tokens > 0 && !params.stop_token_ids.empty();
    const bool of_prompt = params.context_logits || params.prompt_logprobs >= 0;
    return !devices_can_choose(params) || masked || of_prompt || params.top_p_decay != 1.0F ||
           params.beam_width > 0 || params.has_penalties();
}

// A beam search keeps all that it has.
KvWindow seen_by(const SamplingParams& params, const KvWindow& window) {
    return params.beam_width > 0 ? KvWindow{0, 0, window.of_some} : window;
}

RowSampling describe(const SamplingParams& params) {
    RowSampling row;
    if (!params.greedy() && params.beam_width == 0) {
        row.temperature = params.temperature;
        row.top_k = params.top_k;
        row.top_p = params.top_p;
        row.min_p = params.min_p;
    }
    row.num_logprobs = params.logprobs;
    row.repetition = params.repetition_penalty;
    row.frequency = params.frequency_penalty;
    row.presence = params.presence_penalty;
    return row;
}

}  // namespace

Request::Request(RequestId request_id, std::span<const int32_t> prompt_ids, SamplingParams sampling_params,
                 uint64_t sampling_seed, int new_tokens, int vocab_size, const CacheUse& cache,
                 const KvWindow& window)
    : prompt_tokens(static_cast<int>(prompt_ids.size())),
      max_new_tokens(new_tokens),
      latest_token(prompt_ids.back()),
      looks_at_tokens(depends_on_tokens(sampling_params)),
      scores_tokens(sampling_params.logprobs >= 0),
      num_stops(static_cast<uint8_t>(std::min<size_t>(sampling_params.stop_token_ids.size(), 2))),
      row_sampling(describe(sampling_params)),
      first_stop(num_stops > 0 ? sampling_params.stop_token_ids[0] : -1),
      block_table(max_cached_tokens(), cache, seen_by(sampling_params, window)),
      params(std::move(sampling_params)),
      seed(sampling_seed),
      id(request_id) {
    const auto room = static_cast<size_t>(max_new_tokens);
    tokens.reserve(prompt_ids.size() + room);
    tokens.assign(prompt_ids.begin(), prompt_ids.end());
    places = block_table.blocks().data();
    if (params.logprobs >= 0) output_scores = ScoredTokens(room + 1, params.logprobs);
    if (params.has_penalties()) {
        seen = TokenCounts(prompt_ids.size() + room);
        // The prompt counts for the repetition penalty alone.
        if (params.repetition_penalty != 1.0F) {
            for (const int32_t token : prompt_ids) seen.note(token, false);
        }
    }
    if (params.beam_width > 0) {
        beams = std::make_unique<Beams>(
            Beams{{params, max_new_tokens}, {params.beam_width, prompt_tokens, max_cached_tokens()}});
        row_sampling.num_logprobs = beams->search.num_wanted();
    }
    if (params.context_logits || params.prompt_logprobs >= 0) context_rows_left = prompt_tokens;
    if (params.prompt_logprobs >= 0)
        prompt_scores = ScoredTokens(prompt_ids.size() - 1, params.prompt_logprobs);
    const auto vocab = static_cast<size_t>(vocab_size);
    if (params.context_logits) {
        context_logits = std::make_shared_for_overwrite<float[]>(prompt_ids.size() * vocab);
    }
    if (params.generation_logits) {
        generation_logits = std::make_shared_for_overwrite<float[]>(room * vocab);
    }
}

ScoredTokens::ScoredTokens(size_t count, int width)
    : width_(static_cast<size_t>(width)), logprobs_(count), num_top_(count), top_(count * width_) {}

void Request::append(const SampledToken& sampled) {
    const int place = num_output();
    append(sampled.token);
    if (num_output() == place) return;
    if (scores_tokens) output_scores.set(place, sampled);
    if (looks_at_tokens && params.has_penalties()) seen.note(sampled.token, true);
}

void Request::note_start() {
    if (queue_seconds >= 0) return;
    queue_seconds = std::chrono::duration<float>(std::chrono::steady_clock::now() - arrived).count();
}

void Request::note_news() {
    const float since = std::chrono::duration<float>(std::chrono::steady_clock::now() - arrived).count();
    if (first_token_seconds < 0 && num_public() > 0) first_token_seconds = since;
    if (state == RequestState::kFinished) seconds = since;
}

void Request::advance_beams() {
    const bool goes_on = beams->search.choose();
    if (!goes_on) {
        if (beams->search.num_finished() == 0) {
            return finish(FinishReason::kError,
                          "the beam search found no text: the request's rules leave no token");
        }
        stop_token = beams->search.best_stop_token();
        return finish(stop_token < 0 ? FinishReason::kLength : FinishReason::kStop);
    }
    const auto best = beams->search.output(0);
    tokens.resize(static_cast<size_t>(prompt_tokens));
    tokens.insert(tokens.end(), best.begin(), best.end());
    latest_token = tokens.back();
    state = RequestState::kDecoding;
}

int Request::num_found() const {
    const bool found = finish_reason == FinishReason::kStop || finish_reason == FinishReason::kLength;
    return beams != nullptr && found ? beams->search.num_found_tokens() : 0;
}

void Request::give_back(BlockPool& pool) {
    block_table.close(pool);
    if (beams != nullptr) beams->tables.close(pool);
}

void Request::finish(FinishReason reason, std::string message) {
    state = RequestState::kFinished;
    finish_reason = reason;
    error = std::move(message);
}

void RequestQueue::put(size_t place, Request* request) {
    heap_[place] = request;
    request->queue_place = place;
}

void RequestQueue::sift_up(size_t place) {
    Request* request = heap_[place];
    while (place > 0 && request->before(*heap_[(place - 1) / 2])) {
        put(place, heap_[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    put(place, request);
}

void RequestQueue::sift_down(size_t place) {
    Request* request = heap_[place];
    for (;;) {
        size_t child = 2 * place + 1;
        if (child >= heap_.size()) break;
        if (child + 1 < heap_.size() && heap_[child + 1]->before(*heap_[child])) ++child;
        if (!heap_[child]->before(*request)) break;
        put(place, heap_[child]);
        place = child;
    }
    put(place, request);
}

void RequestQueue::push(Request& request) {
    num_tokens_ += request.num_tokens();
    heap_.push_back(&request);
    sift_up(heap_.size() - 1);
}

void RequestQueue::remove(Request& request) {
    num_tokens_ -= request.num_tokens();
    const size_t place = request.queue_place;
    Request* last = heap_.back();
    heap_.pop_back();
    if (last == &request) return;
    put(place, last);
    sift_up(place);
    sift_down(last->queue_place);
}

void RequestQueue::clear() {
    heap_.clear();
    num_tokens_ = 0;
}

}  // namespace castiron
