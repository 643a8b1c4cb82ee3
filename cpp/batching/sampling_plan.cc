#include "batching/sampling_plan.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "sampling/philox.h"

namespace castiron {
namespace {

// The request's random number for a position, in single precision, below 1 as it was.
float uniform_of(const Request& request, size_t position) {
    const auto number = static_cast<float>(uniform_at(request.seed, position));
    return std::min(number, std::nextafter(1.0F, 0.0F));
}

}  // namespace

SamplingPlan::SamplingPlan(const SchedulerLimits& limits, int vocab_limit) : vocab_limit_(vocab_limit) {
    rows_.reserve(static_cast<size_t>(limits.max_logit_rows));
    edits_.reserve(kMaxLogitEdits);
}

bool devices_can_choose(const SamplingParams& params) {
    return !params.generation_logits && !params.process_logits && params.first_mask.empty() &&
           params.rules.empty() && params.typical_p >= 1.0F && params.logprobs <= kMaxDeviceLogprobs;
}

void SamplingPlan::clear() {
    rows_.clear();
    edits_.clear();
}

bool SamplingPlan::add_any(const ScheduledChunk& chunk) {
    if (chunk.num_logits == 0) return true;
    const Request& request = *chunk.request;
    if (!request.needs_host()) {
        add_row(request, 0);
        return true;
    }
    if (request.wants_context_logits() || !devices_can_choose(request.params) ||
        request.row_sampling.num_logprobs > kMaxDeviceLogprobs) {
        return false;
    }
    // The continuations of a beam are raw log-probabilities there.
    if (request.beams != nullptr && (request.params.has_penalties() || request.params.min_tokens > 0)) {
        return false;
    }
    for (size_t drafts = 0; drafts <= request.drafts.size(); ++drafts) {
        if (!add_edits(request, drafts)) return false;
        add_row(request, drafts);
    }
    return true;
}

void SamplingPlan::add_row(const Request& request, size_t drafts) {
    rows_.push_back(request.row_sampling);
    if (rows_.back().temperature <= 0) return;
    const auto known = request.tokens.size() + static_cast<size_t>(request.awaited_tokens);
    rows_.back().uniform = uniform_of(request, known + drafts);
    if (request.needs_host()) {  // top_p may decay
        rows_.back().top_p =
            request.params.top_p_after(request.output(), std::span(request.drafts).first(drafts));
    }
}

// False when the step has no room for them. drafts: how many come before the row.
bool SamplingPlan::add_edits(const Request& request, size_t drafts) {
    const auto row = static_cast<int32_t>(rows_.size());
    const SamplingParams& params = request.params;
    std::span<const int32_t> masked;
    if (request.num_output() + static_cast<int>(drafts) < params.min_tokens) masked = params.stop_token_ids;
    const auto add = [&](int32_t token, int32_t count) {
        if (token < vocab_limit_) edits_.push_back({row, token, count});
    };
    const auto drafted = std::span(request.drafts).first(params.has_penalties() ? drafts : 0);
    const auto seen = request.seen.entries();
    if (edits_.size() + masked.size() + seen.size() + drafted.size() > kMaxLogitEdits) return false;
    const auto holds = [](std::span<const int32_t> tokens, int32_t token) {
        return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
    };
    for (size_t i = 0; i < masked.size(); ++i) {
        if (!holds(masked.first(i), masked[i])) add(masked[i], -1);
    }
    const auto times_drafted = [&](int32_t token) {
        return static_cast<int32_t>(std::count(drafted.begin(), drafted.end(), token));
    };
    for (const TokenCounts::Entry& entry : seen) {
        if (!holds(masked, entry.token)) add(entry.token, entry.count + times_drafted(entry.token));
    }
    for (size_t i = 0; i < drafted.size(); ++i) {
        const int32_t token = drafted[i];
        const bool known =
            holds(drafted.first(i), token) || holds(masked, token) ||
            std::any_of(seen.begin(), seen.end(), [&](const auto& entry) { return entry.token == token; });
        if (!known) add(token, times_drafted(token));
    }
    return true;
}

}  // namespace castiron
