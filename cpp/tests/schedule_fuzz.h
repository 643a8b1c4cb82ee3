// One random life of the scheduler, its KV pool and the sampler, checked after every step against what each
// request says alone and against accounts that are made anew from what everybody holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "batching/scheduler.h"
#include "batching/step_runner.h"
#include "speculation/draft_model.h"
#include "speculation/lookup_drafter.h"
#include "tests/fake_device.h"
#include "tests/fuzz_life.h"
#include "tests/fuzz_totals.h"
#include "tests/oracle_drafter.h"
#include "tests/schedule_checks.h"
#include "tests/toy_grammar.h"

namespace castiron::testing {

class ScheduleFuzz {
public:
    ScheduleFuzz(uint32_t seed, FuzzTotals& totals) : random_(seed), totals_(totals) {
        limits_ = {pick(1, 8), pick(1, 70), pick(1, 8), pick(20, 220), pick(1, 3)};
        if (chance(2)) limits_.kv_window = pick(1, chance(2) ? 60 : 150);
        limits_.window_of_some = limits_.kv_window > 0 && chance(2);
        policy_ = chance(2) ? CapacityPolicy::kMaxUtilization : CapacityPolicy::kGuaranteedNoEvict;
        priorities_ = chance(2) ? 3 : 1;
        salts_ = chance(3) ? 2 : 1;
        caching_ = !chance(8);
        long_ = chance(2) ? 1 : 5;
        const Limits built{limits_.max_batch_size, limits_.max_num_tokens, limits_.max_logit_rows,
                           limits_.max_seq_len};
        device_ = std::make_unique<FakeDevice>(built, kVocab, chance(2), chance(2));
        device_->window = limits_.kv_window;
        device_->window_of_some = limits_.window_of_some;
        const int most = blocks_for_tokens(limits_.max_seq_len);
        large_pool_ = chance(4);
        const int least = limits_.window().most_blocks(limits_.max_seq_len);
        const int blocks = large_pool_ ? 40 * most : least + pick(0, 4);
        const int windows = limits_.window_of_some ? draw_window_blocks(blocks) : 0;
        pool_ = std::make_unique<BlockPool>(blocks, windows, set_aside());
        device_->reserve_kv(blocks, windows);
        if (chance(3)) make_tiers();
        scheduler_ = std::make_unique<Scheduler>(limits_, *pool_, policy_);
        runner_ = std::make_unique<StepRunner>(*device_, limits_, kVocab, kVocab, pool_->tiers());
        draw_drafter();
        if (chance(3)) {
            for (int i = pick(1, 4); i > 0; --i) adapters_.push_back(device_->make_adapter({}));
        }
        for (int i = pick(1, 4); i > 0; --i) families_.push_back(random_tokens(limits_.max_seq_len));
    }

    // Throws std::runtime_error that says what went wrong.
    void run() {
        int arrivals = pick(1, 30);
        while (arrivals > 0 || open_ > 0 || under_way_ != nullptr) {
            while (arrivals > 0 && (open_ == 0 || chance(3))) {
                --arrivals;
                arrive();
            }
            if (chance(40)) cancel_one();
            step();
        }
        require(pool_->used() == 0 && pool_->promised() == 0, "blocks are held although nobody is left");
        require(pool_->free() + pool_->cached() == pool_->total(), "blocks are missing at the end");
        totals_.evictions += pool_->evictions();
        if (const WindowPool* windows = pool_->windows()) {
            require(windows->used() == 0 && windows->promised() == 0,
                    "window blocks are held although nobody is left");
            totals_.windows_evicted += windows->evictions();
        }
    }

private:
    static constexpr int kVocab = 29;

    int pick(int low, int high) {
        return low + static_cast<int>(random_() % static_cast<uint32_t>(high - low + 1));
    }
    bool chance(uint32_t one_in) { return random_() % one_in == 0; }
    std::vector<int32_t> random_tokens(int count) {
        std::vector<int32_t> tokens(static_cast<size_t>(count));
        for (int32_t& token : tokens) token = pick(0, kVocab - 1);
        return tokens;
    }

    [[nodiscard]] int set_aside() const { return KvWindow::window_blocks_of_step(limits_.max_num_tokens); }
    // What a token sees of its past in the end.
    [[nodiscard]] int seen() const { return limits_.window_of_some ? 0 : limits_.kv_window; }

    // As few as a request of full length needs and some more, or so many that none is ever evicted.
    int draw_window_blocks(int blocks) {
        large_windows_ = large_pool_ && chance(2);
        if (large_windows_) return blocks;
        const int one = limits_.window().most_window_blocks(blocks_for_tokens(limits_.max_seq_len));
        return one + set_aside() + pick(0, 6);
    }

    // Of a few blocks each, and files behind them at times.
    void make_tiers() {
        const int slots = pick(1, 3 * pool_->total());
        const int windows = limits_.window_of_some ? pick(1, 2 * slots) : 0;
        std::byte* memory =
            device_->reserve_host_blocks(FakeDevice::kBlockBytes * static_cast<uint64_t>(slots + windows));
        const auto make = [&](KvGroup group, std::byte* to, int count) {
            std::unique_ptr<BlockFile> disk;
            if (chance(2))
                disk = std::make_unique<BlockFile>("/tmp", pick(1, 3 * count), FakeDevice::kBlockBytes);
            return std::make_unique<HostTier>(to, count, FakeDevice::kBlockBytes, std::move(disk), group);
        };
        tier_ = make(KvGroup::kAll, memory, slots);
        if (windows > 0) {
            window_tier_ = make(KvGroup::kWindow,
                                memory + FakeDevice::kBlockBytes * static_cast<uint64_t>(slots), windows);
        }
        pool_->use_tiers({tier_.get(), window_tier_.get()});
    }

    // Nobody guesses, or one who is right at most times, or the text's own past.
    void draw_drafter() {
        const int most = pick(1, 9);
        switch (pick(0, 7)) {
            case 0:
            case 1:
                drafter_ = std::make_unique<OracleDrafter>(most, kVocab, pick(1, 8), random_());
                break;
            case 2:
                drafter_ = std::make_unique<LookupDrafter>(LookupMethod::kNgram, most);
                break;
            case 3:
                drafter_ = std::make_unique<LookupDrafter>(LookupMethod::kSuffix, most);
                break;
            case 4:
            case 5: {  // a model of its own, which knows the same
                const Limits own{pick(1, 8), pick(1, 40), pick(1, 8), pick(20, 220)};
                drafter_ = std::make_unique<DraftModel>(std::make_unique<FakeDevice>(own, kVocab), own,
                                                        kVocab, kVocab, most);
                break;
            }
            default:
                break;
        }
        if (chance(2)) return;
        for (const int rows : {1, 40}) step_cost_.observe(rows, 1.0);  // a row costs nothing: guess at will
    }

    // A beginning of something known, the end of it changed or continued at times.
    std::vector<int32_t> make_prompt(int longest) {
        std::vector<int32_t> prompt =
            families_[static_cast<size_t>(pick(0, static_cast<int>(families_.size()) - 1))];
        if (!lives_.empty() && chance(3)) {  // the next turn of a conversation
            prompt =
                lives_[static_cast<size_t>(pick(0, static_cast<int>(lives_.size()) - 1))].request->tokens;
            for (int i = pick(1, 40); i > 0; --i) prompt.push_back(pick(0, kVocab - 1));
        }
        prompt.resize(std::min(prompt.size(), static_cast<size_t>(pick(1, longest))));
        if (chance(3))
            prompt[static_cast<size_t>(pick(0, static_cast<int>(prompt.size()) - 1))] = pick(0, kVocab - 1);
        return prompt;
    }

    SamplingParams make_params() {
        SamplingParams params;
        params.temperature = 0;
        params.max_tokens = pick(0, chance(long_) ? 150 : 30);
        if (chance(3)) {
            params.temperature = 1.5F;
            if (chance(2)) params.top_k = 5;
            if (chance(2)) params.top_p = 0.8F;
            if (chance(3)) params.frequency_penalty = 0.5F;
        }
        if (chance(4)) params.repetition_penalty = 1.3F;
        if (chance(3)) params.stop_token_ids = {pick(0, kVocab - 1)};
        if (chance(3)) params.min_tokens = pick(0, params.max_tokens);
        if (chance(4)) params.logprobs = pick(0, 3);
        params.context_logits = chance(10);
        if (chance(6)) params.rules.bad_words = {{pick(0, kVocab - 1), pick(0, kVocab - 1)}};
        if (chance(6)) params.num_speculative_tokens = pick(0, 3);
        if (chance(8)) {
            search_beams(params);
        } else if (chance(6)) {
            params.first_mask = {toy_grammar({})};
        }
        return params;
    }

    // Short ones, which take long alone.
    void search_beams(SamplingParams& params) {
        params.beam_width =
            pick(1, std::min({limits_.max_batch_size, limits_.max_num_tokens, limits_.max_logit_rows}));
        params.max_tokens = pick(1, 30);
        params.min_tokens = 1;  // the host chooses then, to the last bit as alone
        params.logprobs = -1;
        params.early_stopping = static_cast<EarlyStopping>(pick(0, 2));
    }

    void arrive() {
        SamplingParams params = make_params();
        const auto prompt = make_prompt(limits_.max_seq_len - (params.max_tokens > 0 ? 1 : 0));
        const int room = limits_.max_seq_len - static_cast<int>(prompt.size());
        const int new_tokens = std::min(params.max_tokens, room);
        if (!fits(static_cast<int>(prompt.size()), new_tokens, params.beam_width)) params.beam_width = 0;
        const int adapter = pick(0, static_cast<int>(adapters_.size()));
        const CacheUse use{caching_ && !chance(10),
                           pick(0, priorities_ - 1),
                           {0, static_cast<uint64_t>(pick(0, salts_ - 1)), adapter}};
        Life life;
        life.request = std::make_unique<Request>(static_cast<RequestId>(lives_.size()) + 1, prompt, params,
                                                 random_(), new_tokens, kVocab, use, limits_.window());
        if (adapter > 0) life.request->adapter = adapters_[static_cast<size_t>(adapter) - 1];
        scheduler_->check_can_ever_run(life.request->prompt_tokens, new_tokens, params.beam_width);
        if (drafter_ != nullptr && params.beam_width == 0 && !chance(8))
            life.request->draft_with(drafter_->begin(*life.request));
        expect_cached(life, lives_);
        scheduler_->enqueue(*life.request);
        lives_.push_back(std::move(life));
        ++open_;
        ++totals_.requests;
    }

    bool fits(int prompt_tokens, int new_tokens, int beam_width) {
        try {
            scheduler_->check_can_ever_run(prompt_tokens, new_tokens, beam_width);
            return true;
        } catch (const std::invalid_argument&) {
            return false;
        }
    }

    void cancel_one() {
        Life& life = lives_[static_cast<size_t>(pick(0, static_cast<int>(lives_.size()) - 1))];
        if (life.request->state == RequestState::kFinished) return;
        ++totals_.cancelled;
        const bool runs = life.request->state != RequestState::kWaiting;
        life.request->finish(FinishReason::kCancelled);
        if (runs && under_way_ != nullptr) return;  // the end of the step takes it out
        life.num_kept = num_kept(*life.request);
        scheduler_->remove(*life.request);
        ended(life);
    }

    // As the engine does: a step is started, then the one before it is finished.
    void step() {
        const StepPlan* plan = under_way_ == nullptr ? next_plan() : chance(4) ? nullptr : next_plan_ahead();
        if (plan != nullptr) {
            ++totals_.steps;
            totals_.ahead += under_way_ != nullptr;
            runner_->pack(*plan);
            require(under_way_ == nullptr || runner_->queued(), "a step planned ahead needs the host");
            const bool poison = chance(200) && poison_first(*plan);
            if (chance(400)) device_->failures = 1;
            if (chance(400)) device_->fails_at_start = runner_->queued();
            if (!on_device([&] { runner_->start(*plan); })) return;
            device_->poisoned_history.clear();
            poisoned_[plan] = poison;
        }
        const size_t chunks = plan != nullptr ? plan->chunks.size() : 0;
        if (under_way_ != nullptr && !finish(*under_way_, true)) return;
        under_way_ = nullptr;
        if (plan == nullptr) return;
        totals_.dropped_rows += static_cast<int64_t>(chunks - plan->chunks.size());
        if (runner_->queued()) {
            under_way_ = plan;
        } else {
            static_cast<void>(finish(*plan, false));
        }
    }

    const StepPlan* next_plan() {
        const std::vector<Request*> before(scheduler_->running().begin(), scheduler_->running().end());
        std::map<const Request*, Before> were;
        for (const Request* request : before) were[request] = {request->num_computed, request->preemptions};
        std::set<int32_t> waiting_priorities;
        for (const Life& life : lives_) {
            if (life.request->state == RequestState::kWaiting)
                waiting_priorities.insert(life.request->priority());
        }
        const StepPlan& plan = scheduler_->schedule();
        if (drafter_ != nullptr) draft(plan);
        check_plan(plan, limits_, *scheduler_, *pool_);
        check_progress(plan, *scheduler_, before);
        check_preemptions(policy_, before, were, waiting_priorities);
        count(plan);
        if (!plan.chunks.empty()) return &plan;
        require(open_ == 0, "a step does nothing while requests are there");
        return nullptr;
    }

    void draft(const StepPlan& plan) {
        const auto wishes = scheduler_->draft_wishes(*drafter_);
        if (wishes.empty()) return;
        StepValue value(step_cost_, plan.num_decodes, scheduler_->rows_left());
        drafter_->draft(wishes, value);
        scheduler_->add_drafts();
    }

    const StepPlan* next_plan_ahead() {
        const StepPlan* plan = scheduler_->schedule_ahead();
        if (plan == nullptr) return nullptr;
        require(plan != under_way_ && !plan->chunks.empty() && plan->preemptions == 0,
                "a plan that cannot be made ahead");
        check_plan(*plan, limits_, *scheduler_, *pool_);
        count(*plan);
        return plan;
    }

    void count(const StepPlan& plan) {
        if (plan.chunks.empty()) return;
        for (const BlockMove& move : plan.moves) {
            totals_.copies += move.kind == BlockMove::Kind::kCopy;
            totals_.saved += move.kind == BlockMove::Kind::kSave;
            totals_.loaded += move.kind == BlockMove::Kind::kLoad;
            totals_.windows_loaded += move.kind == BlockMove::Kind::kLoad && move.group == KvGroup::kWindow;
            totals_.fetched += move.kind == BlockMove::Kind::kFetch;
        }
        totals_.cached_tokens += plan.cached_tokens;
        totals_.preemptions += plan.preemptions;
        totals_.recomputed_tokens += plan.recomputed_tokens;
    }

    // Makes the logits of the plan's first request useless. False where that cannot be: rows of context
    // logits are handed on as they are, and a history that ends in a token of the step under way is not known
    // yet.
    bool poison_first(const StepPlan& plan) {
        const auto has_context = [](const ScheduledChunk& chunk) {
            return chunk.request->params.context_logits;
        };
        const ScheduledChunk& first = plan.chunks[0];
        const std::vector<int32_t>& tokens = first.request->tokens;
        if (std::any_of(plan.chunks.begin(), plan.chunks.end(), has_context) ||
            tokens.size() < static_cast<size_t>(first.end())) {
            return false;
        }
        const auto history = std::span(tokens).first(static_cast<size_t>(first.end()));
        device_->poisoned_history =
            shifted(in_window(history, seen()), shift_of(first.request->adapter.get()));
        return true;
    }

    // False when the device failed. Then no step is under way, and all that ran have ended.
    template <typename Call>
    bool on_device(Call call) {
        try {
            call();
            return true;
        } catch (const std::runtime_error&) {
            device_->scramble();
        }
        device_->poisoned_history.clear();
        under_way_ = nullptr;
        scheduler_->forget_cache();
        for (Request* request : scheduler_->running()) {
            if (request->state != RequestState::kFinished) request->finish(FinishReason::kError, "failed");
        }
        retire(true);
        whole_cache_ = false;
        ++totals_.failures;
        return false;
    }

    bool finish(const StepPlan& plan, bool queued) {
        if (queued && !on_device([&] { runner_->finish(plan); })) return false;
        const bool poison = poisoned_.at(&plan);
        totals_.drafted += plan.num_drafts;
        const auto masks = give_masks(plan);
        const StepRunner::Sampled sampled = runner_->sample(plan);
        for (const auto& [request, given] : masks) {
            totals_.drafted_in_grammars += static_cast<int64_t>(given.size()) - 1;
            request->masks = {};
        }
        totals_.accepted += sampled.right_drafts;
        for (const ScheduledChunk& chunk : plan.chunks) {
            if (chunk.request->finish_reason != FinishReason::kError) continue;
            require(poison, "logits were not finite: " + chunk.request->error);
            whole_cache_ = false;
            ++totals_.poisoned;
        }
        scheduler_->keep_computed(plan, sampled.failed);
        retire(poison);
        return true;
    }

    // Of requests with a grammar: the mask of the token that the step chooses, and those behind its drafts. A
    // grammar may tell less than is asked, and nothing of use behind a draft that it does not take.
    std::map<Request*, std::vector<uint32_t>> give_masks(const StepPlan& plan) {
        std::map<Request*, std::vector<uint32_t>> given;
        for (const ScheduledChunk& chunk : plan.chunks) {
            Request& request = *chunk.request;
            if (!request.constrained() || !chunk.completes()) continue;
            std::vector<int32_t> text(request.output().begin(), request.output().end());
            std::vector<uint32_t>& masks = given[&request];
            masks.push_back(toy_grammar(text));
            for (const int32_t draft : request.drafts) {
                if ((masks.back() >> draft & 1U) == 0 || chance(10)) break;
                text.push_back(draft);
                masks.push_back(toy_grammar(text));
            }
            request.masks = {masks, masks.size()};
        }
        return given;
    }

    void retire(bool may_fail) {
        std::vector<Life*> gone;
        for (Request* request : scheduler_->running()) {
            Life& life = life_of(*request);
            life.num_kept = num_kept(*request);
            if (request->state != RequestState::kFinished) continue;
            gone.push_back(&life);
            totals_.released += request->block_table.num_released();
            totals_.slid += request->block_table.num_released() > 0;
            totals_.windows_passed += request->block_table.windows().first();
        }
        scheduler_->retire_finished();
        for (Life* life : gone) {
            life->failed_allowed = may_fail;
            ended(*life);
        }
        std::vector<const Request*> all;
        for (const Life& life : lives_) all.push_back(life.request.get());
        check_accounts(all, *scheduler_, *pool_);
    }

    Life& life_of(const Request& request) { return lives_[static_cast<size_t>(request.id) - 1]; }

    void ended(Life& life) {
        --open_;
        const Request& request = *life.request;
        const std::string name = "request " + std::to_string(request.id);
        if (request.finish_reason == FinishReason::kError) {
            require(life.failed_allowed, name + " failed: " + request.error);
        }
        check_output(request, name, kVocab, seen());
        const bool ended_well =
            request.finish_reason == FinishReason::kStop || request.finish_reason == FinishReason::kLength;
        totals_.beam_searches += ended_well && request.beams != nullptr;
        totals_.adapted += ended_well && request.adapter != nullptr;
        require(request.cached_tokens <= life.most_cached,
                name + " took " + std::to_string(request.cached_tokens) + " tokens from the cache, and has " +
                    std::to_string(life.most_cached) + " in common with others");
        // Of a chunk that is longer than the window the blocks may be given back before it is done.
        const bool outrun = limits_.kv_window > 0 && device_->queues();
        const bool windows_whole = pool_->windows() == nullptr || pool_->windows()->evictions() == 0;
        const bool whole = whole_cache_ && pool_->evictions() == 0 && windows_whole && !outrun;
        // A part of a block is copied only where a block can be spared.
        const bool can_copy = large_pool_ && (large_windows_ || !limits_.window_of_some);
        const int least = can_copy ? life.least_cached : life.least_cached / kBlockTokens * kBlockTokens;
        if (whole && request.num_output() > 0) {
            require(request.cached_tokens >= least, name + " took " + std::to_string(request.cached_tokens) +
                                                        " tokens from the cache, which had " +
                                                        std::to_string(life.least_cached));
        }
    }

    std::mt19937 random_;
    FuzzTotals& totals_;
    SchedulerLimits limits_;
    CapacityPolicy policy_ = CapacityPolicy::kGuaranteedNoEvict;
    int priorities_ = 1;
    int salts_ = 1;
    bool caching_ = true;
    bool large_pool_ = false;  // nothing is ever evicted
    bool large_windows_ = false;
    uint32_t long_ = 1;        // one request in so many may have a long output
    bool whole_cache_ = true;  // nothing was taken out of the cache but by eviction
    std::unique_ptr<FakeDevice> device_;
    std::unique_ptr<BlockPool> pool_;
    std::unique_ptr<HostTier> tier_, window_tier_;  // none: what is evicted is gone
    std::unique_ptr<Scheduler> scheduler_;
    std::unique_ptr<StepRunner> runner_;
    std::unique_ptr<Drafter> drafter_;  // none: no speculation in this life
    StepCost step_cost_;
    std::vector<std::shared_ptr<const Adapter>> adapters_;
    std::vector<std::vector<int32_t>> families_;
    std::vector<Life> lives_;  // request ids are 1 and up
    const StepPlan* under_way_ = nullptr;
    std::map<const StepPlan*, bool> poisoned_;
    int open_ = 0;
};

}  // namespace castiron::testing
