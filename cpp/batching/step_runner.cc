#include "batching/step_runner.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace castiron {

namespace {

void end_not_finite(Request& request, int position) {
    request.finish(FinishReason::kError, "the model's logits are not finite (NaN or infinity) at position " +
                                             std::to_string(position) +
                                             "; the weights or the input are out of range");
}

// A request may have ended already, for want of a mask.
bool wants_processing(const ScheduledChunk& chunk) {
    const Request& request = *chunk.request;
    return request.params.process_logits && request.state != RequestState::kFinished && chunk.completes() &&
           request.max_new_tokens > 0;
}

}  // namespace

StepRunner::StepRunner(Device& device, const SchedulerLimits& limits, int vocab_size, int vocab_limit,
                       const HostTiers& tiers)
    : device_(device),
      tiers_(tiers),
      has_window_blocks_(limits.window_of_some),
      vocab_size_(static_cast<size_t>(vocab_size)),
      sampler_(vocab_size, vocab_limit),
      sampling_(limits, vocab_limit) {
    token_ids_.reserve(static_cast<size_t>(limits.max_num_tokens));
    token_sources_.reserve(static_cast<size_t>(limits.max_num_tokens));
    positions_.reserve(static_cast<size_t>(limits.max_num_tokens));
    logit_rows_.reserve(static_cast<size_t>(limits.max_logit_rows));
    sequences_.reserve(static_cast<size_t>(limits.max_batch_size));
}

void StepRunner::pack(const StepPlan& plan) {
    for (auto* array : {&token_ids_, &token_sources_, &positions_}) {
        array->resize(static_cast<size_t>(plan.num_tokens));
    }
    logit_rows_.clear();
    sequences_.clear();
    sampling_.clear();
    device_samples_ = device_.samples();
    int first_row = 0;
    for (const ScheduledChunk& chunk : plan.chunks) {
        if (chunk.plain) {
            pack_plain(chunk, first_row);
        } else {
            pack_tokens(chunk, first_row);
        }
        for (int t = chunk.num_tokens - chunk.num_logits; t < chunk.num_tokens; ++t) {
            logit_rows_.push_back(first_row + t);
        }
        sequences_.push_back(
            {first_row, chunk.num_tokens, chunk.start, chunk.blocks(), chunk.request->adapter.get()});
        if (has_window_blocks_) sequences_.back().window_table = chunk.windows();
        device_samples_ = device_samples_ && sampling_.add(chunk);
        first_row += chunk.num_tokens;
        count_started(chunk);
    }
}

// One row; its token may be one that the step under way is still choosing.
void StepRunner::pack_plain(const ScheduledChunk& chunk, int first_row) {
    const Request& request = *chunk.request;
    const auto row = static_cast<size_t>(first_row);
    const bool known = request.num_tokens() > chunk.start;
    token_ids_[row] = known ? request.latest_token : 0;
    token_sources_[row] = known ? -1 : request.awaited_row;
    positions_[row] = chunk.start;
}

// The last of the pending tokens may be one that the step under way is still choosing.
void StepRunner::pack_tokens(const ScheduledChunk& chunk, int first_row) {
    const Request& request = *chunk.request;
    const int pending = chunk.num_pending();
    const int known = chunk.beam >= 0 ? pending : request.num_tokens() - chunk.start;
    const auto row = static_cast<size_t>(first_row);
    const int32_t* tokens = chunk.tokens();
    for (int t = 0; t < pending; ++t) {
        token_ids_[row + static_cast<size_t>(t)] = t < known ? tokens[t] : 0;
        token_sources_[row + static_cast<size_t>(t)] = t < known ? -1 : request.awaited_row;
    }
    for (int t = pending; t < chunk.num_tokens; ++t) {
        token_ids_[row + static_cast<size_t>(t)] = request.drafts[static_cast<size_t>(t - pending)];
        token_sources_[row + static_cast<size_t>(t)] = -1;
    }
    for (int t = 0; t < chunk.num_tokens; ++t) positions_[row + static_cast<size_t>(t)] = chunk.start + t;
}

void StepRunner::start(const StepPlan& plan) {
    for (const BlockMove& move : plan.moves) make(move);
    run(plan, {token_ids_, positions_, logit_rows_, sequences_, token_sources_});
}

void StepRunner::make(const BlockMove& move) {
    HostTier* tier = tiers_.of(move.group);
    switch (move.kind) {
        case BlockMove::Kind::kCopy:
            return device_.copy_kv_block(move.group, move.from, move.to);
        case BlockMove::Kind::kSave:
            return device_.save_kv_block(move.group, move.from, tier->data(move.to));
        case BlockMove::Kind::kLoad:
            return device_.load_kv_block(move.group, tier->data(move.from), move.to);
        case BlockMove::Kind::kSpill:
        case BlockMove::Kind::kFetch:
            return tier->make(move);
    }
}

void StepRunner::count_started(const ScheduledChunk& chunk) {
    Request& request = *chunk.request;
    request.num_computed = chunk.end();
    if (!chunk.completes() || request.max_new_tokens == 0 || request.searches()) return;
    request.state = RequestState::kDecoding;
    ++request.awaited_tokens;
    request.awaited_row = chunk.row + chunk.num_logits - 1;
}

void StepRunner::run(const StepPlan& plan, const Batch& batch) {
    if (queued()) return device_.start(batch, sampling_.batch());
    if (device_samples_) {
        sampled_ = device_.forward_and_sample(batch, sampling_.batch());
        return check_sampled(plan);
    }
    const size_t rows = logit_rows_.size();
    logits_ = device_.forward(batch);
    if (logits_.size() != rows * vocab_size_) {
        throw std::logic_error("the device returned " + std::to_string(logits_.size()) + " logits for " +
                               std::to_string(rows) + " rows of " + std::to_string(vocab_size_));
    }
}

void StepRunner::finish(const StepPlan& plan) {
    sampled_ = device_.finish();
    check_sampled(plan);
}

void StepRunner::check_sampled(const StepPlan& plan) const {
    if (sampled_.rows.size() == static_cast<size_t>(plan.num_logit_rows)) return;
    throw std::logic_error("the device returned " + std::to_string(sampled_.rows.size()) + " tokens for " +
                           std::to_string(plan.num_logit_rows) + " rows of logits");
}

void StepRunner::process_logits(const StepPlan& plan, LogitsExchange& exchange,
                                std::chrono::steady_clock::duration patience) {
    bool any = false;
    for (const ScheduledChunk& chunk : plan.chunks) {
        const Request& request = *chunk.request;
        if (!wants_processing(chunk)) continue;
        const auto row = static_cast<size_t>(chunk.row + chunk.num_logits - 1);
        exchange.show(request.id, request.output(), logits_.subspan(row * vocab_size_, vocab_size_));
        any = true;
    }
    if (!any) return;
    const auto deadline = std::chrono::steady_clock::now() + patience;
    for (const ScheduledChunk& chunk : plan.chunks) {
        Request& request = *chunk.request;
        if (!wants_processing(chunk)) continue;
        try {
            request.changed_logits = exchange.wait(request.id, deadline);
        } catch (const std::exception& error) {
            request.finish(FinishReason::kError, error.what());
        }
    }
}

StepRunner::Sampled StepRunner::sample(const StepPlan& plan) {
    Sampled result;
    for (const ScheduledChunk& chunk : plan.chunks) {
        const Request& request = *chunk.request;
        if (!device_samples_ || !note_plain(chunk)) result.right_drafts += sample_chunk(chunk);
        if (request.state != RequestState::kFinished) continue;
        result.ended = true;
        result.failed |= request.finish_reason == FinishReason::kError;
    }
    return result;
}

// What most chunks of most steps are: a token that the device chose for a request which asks for no more.
bool StepRunner::note_plain(const ScheduledChunk& chunk) {
    Request& request = *chunk.request;
    if (!chunk.plain || request.state != RequestState::kDecoding) return false;
    const SampledRows::Row chosen = sampled_.rows[static_cast<size_t>(chunk.row)];
    if (chosen.status != 0 || static_cast<uint32_t>(chosen.token) >= vocab_size_) return false;
    --request.awaited_tokens;
    request.append(chosen.token);
    return true;
}

// Returns how many drafts were right.
int StepRunner::sample_chunk(const ScheduledChunk& chunk) {
    Request& request = *chunk.request;
    const auto row = static_cast<size_t>(chunk.row);
    int right = 0;
    if (request.wants_context_logits()) keep_prompt_rows(chunk, row);
    if (!chunk.completes() || request.state == RequestState::kFinished) {
        // Not yet, or not any more: cancelled while the step ran, or its grammar had no mask to give, its
        // processor no logits, or its prompt or another beam no finite logits.
    } else if (request.max_new_tokens == 0) {
        request.finish(FinishReason::kLength);
    } else if (request.searches()) {
        continue_beam(chunk, row + static_cast<size_t>(chunk.num_logits) - 1);
    } else {
        --request.awaited_tokens;
        const auto first = row + static_cast<size_t>(chunk.num_logits - chunk.num_drafts) - 1;
        sample_next(request, first);
        if (chunk.num_drafts > 0) right = sample_drafted(chunk, first + 1);
    }
    if (chunk.num_drafts > 0) request.drafts.clear();
    return right;
}

// A draft that is the token just chosen has its keys and values in the cache, and the logits after it. What
// lies behind the first wrong one is as if it had never been fed: num_computed leaves it out, and the next
// step writes over it.
int StepRunner::sample_drafted(const ScheduledChunk& chunk, size_t first_row) {
    Request& request = *chunk.request;
    int right = 0;
    for (const int32_t draft : request.drafts) {
        if (request.state != RequestState::kDecoding || request.tokens.back() != draft) break;
        const auto drafts = static_cast<size_t>(right) + 1;
        if (request.constrained() && drafts >= request.masks.count) break;  // nobody knows what may follow
        ++request.num_computed;
        sample_next(request, first_row + static_cast<size_t>(right++), drafts);
    }
    return right;
}

void StepRunner::keep_prompt_rows(const ScheduledChunk& chunk, size_t first_row) {
    Request& request = *chunk.request;
    if (request.context_logits != nullptr) {
        std::copy_n(logits_.data() + first_row * vocab_size_,
                    static_cast<size_t>(chunk.num_logits) * vocab_size_,
                    request.context_logits.get() + static_cast<size_t>(chunk.start) * vocab_size_);
    }
    if (request.params.prompt_logprobs >= 0) {
        for (int i = 0; i < chunk.num_logits; ++i) {
            score_prompt(request, first_row + static_cast<size_t>(i), chunk.start + i);
        }
    }
    request.context_rows_left =
        std::min(request.context_rows_left, request.prompt_tokens - chunk.start - chunk.num_logits);
}

// The row's logits, those of the token at `position`, predict the prompt token after it.
void StepRunner::score_prompt(Request& request, size_t row, int position) {
    if (position + 1 >= request.prompt_tokens || request.state == RequestState::kFinished) return;
    const int32_t token = request.tokens[static_cast<size_t>(position) + 1];
    const SampledToken scored = sampler_.score(logits_.subspan(row * vocab_size_, vocab_size_), token,
                                               request.prompt_scores.top_of(position));
    if (scored.status != SampleStatus::kOk) return end_not_finite(request, position);
    request.prompt_scores.set(position, scored);
}

// drafts: how many right ones come before the row.
void StepRunner::sample_next(Request& request, size_t row, size_t drafts) {
    std::span<TokenLogprob> top;
    if (request.scores_tokens && request.params.logprobs > 0)
        top = request.output_scores.top_of(request.num_output());
    if (request.looks_at_tokens && request.generation_logits != nullptr) {
        std::copy_n(
            logits_.data() + row * vocab_size_, vocab_size_,
            request.generation_logits.get() + static_cast<size_t>(request.num_output()) * vocab_size_);
    }
    const SampledToken sampled =
        device_samples_
            ? sampled_row(row, top)
            : sampler_.sample(logits_.subspan(row * vocab_size_, vocab_size_),
                              {request.params, request.seed, request.prompt(), request.output(),
                               request.masks.row(drafts), std::exchange(request.changed_logits, {})},
                              top);
    switch (sampled.status) {
        case SampleStatus::kOk:
            request.append(sampled);
            break;
        case SampleStatus::kNotFinite:
            end_not_finite(request, request.num_tokens() - 1);
            break;
        case SampleStatus::kNothingAllowed:
            request.finish(FinishReason::kError, "no token is allowed at position " +
                                                     std::to_string(request.num_tokens()) +
                                                     ": all of the vocabulary is masked");
            break;
    }
}

void StepRunner::continue_beam(const ScheduledChunk& chunk, size_t row) {
    Request& request = *chunk.request;
    BeamSearch& search = request.beams->search;
    const int beam = std::max(chunk.beam, 0);
    const auto to = search.continuations(beam);
    const SampledToken found =
        device_samples_ ? sampled_row(row, to)
                        : sampler_.continuations(
                              logits_.subspan(row * vocab_size_, vocab_size_),
                              {request.params, request.seed, request.prompt(), search.output(beam)}, to);
    if (found.status != SampleStatus::kOk) {
        return end_not_finite(request, request.prompt_tokens + search.length() - 1);
    }
    search.set_num_continuations(beam, found.num_top);
    if (chunk.last_of_request()) request.advance_beams();
}

SampledToken StepRunner::sampled_row(size_t row, std::span<TokenLogprob> top) const {
    SampledToken result;
    result.status = static_cast<SampleStatus>(sampled_.rows[row].status);
    result.token = sampled_.rows[row].token;
    const bool known = result.status == SampleStatus::kNotFinite ||
                       result.status == SampleStatus::kNothingAllowed ||
                       (result.status == SampleStatus::kOk && result.token >= 0 &&
                        static_cast<size_t>(result.token) < vocab_size_);
    if (!known) {
        throw std::logic_error("the device chose token " + std::to_string(result.token) + " with status " +
                               std::to_string(sampled_.rows[row].status) +
                               "; its sampling kernels are at fault");
    }
    if (sampled_.top_logprobs.empty() || result.status != SampleStatus::kOk) return result;
    const auto ids = sampled_.top_ids.subspan(row * kMaxDeviceLogprobs, kMaxDeviceLogprobs);
    const auto logprobs =
        sampled_.top_logprobs.subspan(row * (1 + kMaxDeviceLogprobs), 1 + kMaxDeviceLogprobs);
    result.logprob = logprobs[0];
    for (size_t i = 0; i < std::min(top.size(), ids.size()) && ids[i] >= 0; ++i) {
        top[i] = {ids[i], logprobs[1 + i]};
        ++result.num_top;
    }
    return result;
}

}  // namespace castiron
