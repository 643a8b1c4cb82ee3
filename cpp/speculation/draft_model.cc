#include "speculation/draft_model.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>

#include "batching/request.h"
#include "kv/block_table.h"
#include "kv/pool_size.h"
#include "speculation/hit_rates.h"

namespace castiron {
namespace {

// Guesses by the probability that the draft model gives them: below 0.1, 0.3, 0.5, 0.7, 0.85, 0.95, and 1.
constexpr std::array<float, 6> kBounds{0.1F, 0.3F, 0.5F, 0.7F, 0.85F, 0.95F};
constexpr std::array<float, 7> kBeliefs{0.05F, 0.2F, 0.4F, 0.6F, 0.75F, 0.9F, 0.97F};

size_t kind_of(double probability) {
    const auto bound = std::upper_bound(kBounds.begin(), kBounds.end(), static_cast<float>(probability));
    return static_cast<size_t>(bound - kBounds.begin());
}

int blocks_of(Device& device, const Limits& limits) {
    const KvBudget budget = device.kv_budget();
    // In one group: guesses are few and short, and no table of window blocks is kept for them.
    const KvShape shape{device.kv_block_bytes() + device.kv_window_group().block_bytes, 0, {}};
    return choose_pool_size({}, limits, shape, budget.available, budget.by_default).blocks;
}

}  // namespace

struct DraftModel::State final : DraftState {
    State(size_t most_tokens, int max_tokens)
        : table(static_cast<int64_t>(most_tokens), CacheUse{false, 0, {}}) {
        guesses.reserve(static_cast<size_t>(max_tokens) + 1);
        text.reserve(most_tokens);
    }

    // Compares what came with what was guessed. What the cache holds behind it is of no use.
    void learn(std::span<const int32_t> tokens) {
        const auto came = tokens.subspan(seen);
        const size_t right = rates.compare(guesses, came);
        if (!guesses.empty()) first.observe(0, right > 0);
        // The last token is always fed: its logits are what is wanted.
        computed = std::min(computed, static_cast<int>(std::min(seen + right, tokens.size() - 1)));
        text.resize(seen);
        text.insert(text.end(), came.begin(), came.end());
        seen = tokens.size();
        guesses.clear();
    }

    BlockTable table;
    HitRates<kBeliefs.size()> rates{kBeliefs};
    HitRates<1> first{std::array<float, 1>{0.7F}};  // of the first guess of a step
    std::vector<Guess> guesses;                     // one more than are drafted: it teaches, too
    std::vector<int32_t> text;  // the request's tokens when they were made, and those that were drafted
    size_t seen = 0;            // the former
    int computed = 0;           // tokens of the text that the draft model's cache holds
    int skipped = 0;            // steps without a guess
};

DraftModel::DraftModel(std::unique_ptr<Device> device, const Limits& limits, int vocab_size, int vocab_limit,
                       int max_tokens)
    : device_(std::move(device)),
      limits_(limits),
      vocab_size_(static_cast<size_t>(vocab_size)),
      max_tokens_(max_tokens),
      pool_(blocks_of(*device_, limits)),
      sampler_(vocab_size, vocab_limit) {
    device_->reserve_kv(pool_.total(), 0);
    parts_.reserve(static_cast<size_t>(limits_.max_batch_size));
    sequences_.reserve(static_cast<size_t>(limits_.max_batch_size));
    token_ids_.reserve(static_cast<size_t>(limits_.max_num_tokens));
    positions_.reserve(static_cast<size_t>(limits_.max_num_tokens));
    logit_rows_.reserve(static_cast<size_t>(limits_.max_logit_rows));
}

std::unique_ptr<DraftState> DraftModel::begin(const Request& request) const {
    const auto known = [this](int32_t token) { return static_cast<size_t>(token) < vocab_size_; };
    if (!std::all_of(request.tokens.begin(), request.tokens.end(), known)) return nullptr;
    const size_t most = static_cast<size_t>(request.prompt_tokens + request.max_new_tokens);
    return std::make_unique<State>(most, max_tokens_);
}

void DraftModel::release(Request& request) {
    auto& state = static_cast<State&>(*request.draft_state);
    state.table.close(pool_);
    state.computed = 0;
}

// Whether the request takes part in the step's first pass.
bool DraftModel::join(const DraftWish& wish, const StepValue& value) {
    constexpr int kStepsBetweenTries = 16;
    Request& request = *wish.request;
    auto& state = static_cast<State&>(*request.draft_state);
    state.learn(request.tokens);
    const auto know = static_cast<size_t>(request.num_tokens());
    if (parts_.size() >= static_cast<size_t>(std::min(limits_.max_batch_size, limits_.max_logit_rows)))
        return false;
    const int room = std::min(wish.room, limits_.max_seq_len - static_cast<int>(know));
    if (room < 1 || static_cast<size_t>(request.tokens.back()) >= vocab_size_) return false;
    const bool pays = value.worth(state.first.of(0), cost_.observed() ? cost_.seconds(1) : 0);
    if (!pays && ++state.skipped % kStepsBetweenTries != 0) return false;
    if (!state.table.reserve(pool_, static_cast<int64_t>(know) + room - 1)) return false;
    parts_.push_back({&request, &state, room, 0, false, 1});
    return true;
}

// What each request feeds of its pending tokens, within the limits of a pass.
void DraftModel::size_chunks() {
    int left = limits_.max_num_tokens;
    for (Part& part : parts_) {
        const int pending = static_cast<int>(part.state->text.size()) - part.state->computed;
        part.tokens = std::min(pending, left);
        part.completes = part.tokens == pending;
        left -= part.tokens;
    }
    std::erase_if(parts_, [](const Part& part) { return part.tokens == 0; });
}

void DraftModel::pass() {
    token_ids_.clear();
    positions_.clear();
    logit_rows_.clear();
    sequences_.clear();
    for (const Part& part : parts_) {
        State& state = *part.state;
        const auto first_row = static_cast<int>(token_ids_.size());
        state.table.grow(pool_, state.computed + part.tokens);
        for (int position = state.computed; position < state.computed + part.tokens; ++position) {
            token_ids_.push_back(state.text[static_cast<size_t>(position)]);
            positions_.push_back(position);
        }
        if (part.completes) logit_rows_.push_back(first_row + part.tokens - 1);
        sequences_.push_back({first_row, part.tokens, state.computed, state.table.blocks()});
    }
    const auto begin = std::chrono::steady_clock::now();
    logits_ = device_->forward({token_ids_, positions_, logit_rows_, sequences_});
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    if (token_ids_.size() == parts_.size()) cost_.observe(static_cast<int>(parts_.size()), spent.count());
    for (const Part& part : parts_) part.state->computed += part.tokens;
}

// A guess of each request whose tokens are all fed; those that go on stay in parts_.
void DraftModel::guess(StepValue& value) {
    size_t row = 0;
    const auto count = static_cast<int>(parts_.size());
    const double share = cost_.observed() ? cost_.seconds(count) / count : 0;
    std::erase_if(parts_, [&](Part& part) {
        if (!part.completes) return true;
        Request& request = *part.request;
        State& state = *part.state;
        const auto logits = logits_.subspan(row++ * vocab_size_, vocab_size_);
        // Guesses count as output: penalties and random numbers are those of their places.
        const auto output = std::span(state.text).subspan(static_cast<size_t>(request.prompt_tokens));
        const SampledToken chosen =
            sampler_.sample(logits, {request.params, request.seed, request.prompt(), output}, {});
        if (chosen.status != SampleStatus::kOk) return true;
        const SampledToken scored = sampler_.score(logits, chosen.token, {});
        const size_t kind = kind_of(std::exp(static_cast<double>(scored.logprob)));
        state.guesses.push_back({chosen.token, kind});
        part.probability *= state.rates.of(kind);
        if (!value.worth(part.probability)) return true;
        value.add(part.probability);
        request.drafts.push_back(chosen.token);
        state.text.push_back(chosen.token);
        return static_cast<int>(request.drafts.size()) == part.room || !value.worth(part.probability, share);
    });
}

void DraftModel::draft(std::span<const DraftWish> wishes, StepValue& value) {
    if (failed_) return;
    parts_.clear();
    for (const DraftWish& wish : wishes) static_cast<void>(join(wish, value));
    try {
        while (!parts_.empty()) {
            size_chunks();
            pass();
            guess(value);
        }
    } catch (const std::exception& error) {
        failed_ = true;
        std::fprintf(stderr, "castiron: the draft engine failed, and guesses no more: %s\n", error.what());
    }
}

}  // namespace castiron
