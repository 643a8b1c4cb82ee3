// The engine's own threads: the loop that runs the steps, and the watchdog.
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "batching/engine.h"
#include "batching/stall_report.h"

namespace castiron {
namespace {

// The device came back after the watchdog had given it up.
struct GivenUp {};

constexpr size_t kReportedSteps = 5;  // before the one that hangs

}  // namespace

void Engine::loop() {
    pthread_setname_np(pthread_self(), "castiron-engine");
    try {
        StepRecord record;
        while (take_in(record)) {
            turn(record);
            record = {};
        }
        end_all(FinishReason::kCancelled, "");
    } catch (const GivenUp&) {
        // All has ended already.
    } catch (const std::exception& error) {
        end_all(FinishReason::kError, error.what());
    } catch (...) {
        end_all(FinishReason::kError, "an exception of unknown type");
    }
    const std::lock_guard lock(mutex_);
    thread_ended_ = true;
    ends_.notify_all();
}

// Sleeps until there is work, takes in what was submitted and cancelled. False when it is time to end.
bool Engine::take_in(StepRecord& record) {
    std::unique_lock lock(mutex_);
    const auto has_work = [this] {
        return stopping_ || !inbox_.empty() || !cancels_.empty() || under_way_.plan != nullptr ||
               !scheduler_.running().empty() || !scheduler_.waiting().empty();
    };
    if (steps_ > checked_steps_ && !work_.wait_for(lock, kIdleCheck, has_work)) {
        lock.unlock();
        check_cache();
        lock.lock();
    }
    work_.wait(lock, has_work);
    if (stopping_) return false;
    const auto begin = Clock::now();
    record.start = std::chrono::duration<double>(begin - born_).count();
    for (Request* request : inbox_) scheduler_.enqueue(*request);
    inbox_.clear();
    inbox_tokens_ = 0;
    const bool news = take_in_cancels();
    update_gauges();
    lock.unlock();
    if (news) events_.notify_all();
    record.intake = std::chrono::duration<double>(Clock::now() - begin).count();
    return true;
}

// Under mutex_. A request that a step under way may hold only ends here; that step's end takes it out, and it
// is published then or at the next turn. True when something was published.
bool Engine::take_in_cancels() {
    bool news = false;
    std::erase_if(cancels_, [&](RequestId id) {
        const auto found = live_.find(id);
        if (found == live_.end() || found->second->published_finish) return true;
        Request& request = *found->second;
        if (request.state != RequestState::kFinished) {
            const bool runs = request.state != RequestState::kWaiting;
            request.finish(FinishReason::kCancelled);
            if (runs && under_way_.plan != nullptr) {
                cancelled_under_way_ = true;
                return false;
            }
            scheduler_.remove(request);
        }
        publish(request);
        return news = true;
    });
    return news;
}

// Nothing runs and nothing waits: no block may be in use or promised.
void Engine::check_cache() {
    checked_steps_ = steps_;
    std::string found;
    try {
        pool_.check_integrity();
        const WindowPool* windows = pool_.windows();
        const int read = windows != nullptr ? windows->used() + windows->promised() : 0;
        if (pool_.used() + pool_.promised() + read > 0) {
            found = std::to_string(pool_.used()) + " KV blocks are in use, " +
                    std::to_string(pool_.promised()) + " promised and " + std::to_string(read) +
                    " window blocks either, and no request is there";
        }
    } catch (const std::logic_error& error) {
        found = error.what();
    }
    if (found.empty()) return;
    pool_ = BlockPool(pool_size_.blocks, pool_size_.window_blocks, pool_size_.set_aside);
    tiers_.all().each([](HostTier& tier) { tier.clear(); });
    pool_.use_tiers(tiers_.all());
    const std::lock_guard lock(mutex_);
    stats_.kv_integrity_error = found;
    update_gauges();
}

// Starts the next step, if it can be planned yet, and finishes the one under way. A step stays under way if
// the device queues steps.
void Engine::turn(StepRecord& record) {
    StartedStep next;
    next.record = record;
    const auto begin = Clock::now();
    next.plan = next_plan();
    if (next.plan != nullptr) {
        next.record.step = ++steps_;
        if (drafter_ != nullptr && under_way_.plan == nullptr && next.plan->num_decodes > 0) add_drafts(next);
        runner_.pack(*next.plan);
        if (under_way_.plan != nullptr && !runner_.queued()) {
            throw std::logic_error("a step that was planned ahead must wait for the one before");
        }
        const std::chrono::duration<double> prepared = Clock::now() - begin;
        next.record.schedule = prepared.count() - next.record.draft;
        if (!start(next)) return;
    }
    if (under_way_.plan != nullptr && !finish(under_way_)) return;
    under_way_ = {};
    if (next.queued) {
        under_way_ = next;
    } else if (next.plan != nullptr) {
        static_cast<void>(finish(next));
    }
}

// The guessing may take a device of its own, which the watchdog looks after as well: a drafter reads tokens
// and parameters, and writes drafts, none of which is touched where requests are ended.
void Engine::add_drafts(StartedStep& step) {
    const auto begin = Clock::now();
    const auto wishes = scheduler_.draft_wishes(*drafter_);
    if (!wishes.empty()) {
        StepValue value(step_cost_, step.plan->num_decodes, scheduler_.rows_left());
        enter_device(step);
        drafter_->draft(wishes, value);
        leave_device();
        scheduler_.add_drafts();
        ask_along_drafts(*step.plan);
    }
    step.record.draft = std::chrono::duration<double>(Clock::now() - begin).count();
}

// Masks behind drafts are made while the step runs that checks them.
void Engine::ask_along_drafts(const StepPlan& plan) {
    if (plan.num_drafts == 0) return;
    for (const ScheduledChunk& chunk : plan.chunks) {
        const Request& request = *chunk.request;
        if (chunk.num_drafts > 0 && request.constrained()) masks_.ask_along(request.id, request.drafts);
    }
}

// None when nothing is left to do, or when the step under way must be finished first.
const StepPlan* Engine::next_plan() {
    if (under_way_.plan != nullptr) return scheduler_.schedule_ahead();
    const StepPlan& plan = scheduler_.schedule();
    if (!plan.chunks.empty()) return &plan;
    if (scheduler_.running().empty() && scheduler_.waiting().empty()) return nullptr;
    throw std::logic_error("requests are waiting and the scheduler runs none of them");
}

// Runs the packed step, or lets the device begin with it. False when the device failed; the running requests
// have ended then.
bool Engine::start(StartedStep& step) {
    StepRecord& record = step.record;
    record.decode_tokens = step.plan->num_decodes;
    record.draft_tokens = step.plan->num_drafts;
    record.prefill_tokens = step.plan->num_prefill_tokens();
    record.logit_rows = step.plan->num_logit_rows;
    record.queried_tokens = step.plan->queried_tokens;
    record.cached_tokens = step.plan->cached_tokens;
    record.recomputed_tokens = step.plan->recomputed_tokens;
    record.preemptions = step.plan->preemptions;
    record.device_sampled = runner_.device_samples();
    record.ahead = under_way_.plan != nullptr;
    step.started = Clock::now();
    if (!on_device(step, [&] { runner_.start(*step.plan); })) return false;
    record.graph = device_->graph_bucket();
    step.queued = runner_.queued();
    return true;
}

// Waits for the step, samples and hands over. False as start().
bool Engine::finish(StartedStep& step) {
    const StepPlan& plan = *step.plan;
    const auto first = std::max(step.started, last_finish_);
    if (step.queued && !on_device(step, [&] { runner_.finish(plan); })) return false;
    last_finish_ = Clock::now();
    failures_in_a_row_ = 0;
    take_masks(plan);
    if (plan.needs_host) runner_.process_logits(plan, processors_, kMaskPatience);
    const StepRunner::Sampled sampled = runner_.sample(plan);
    step.record.accepted_tokens = sampled.right_drafts;
    scheduler_.keep_computed(plan, sampled.failed);
    ask_for_masks(plan);
    step.record.queued = std::chrono::duration<double>(first - step.started).count();
    step.record.forward = std::chrono::duration<double>(last_finish_ - first).count();
    step.record.sample = std::chrono::duration<double>(Clock::now() - last_finish_).count();
    if (drafter_ != nullptr && plan.num_decodes > 0 && step.record.prefill_tokens == 0) {
        step_cost_.observe(plan.num_tokens, step.record.forward + step.record.sample);
    }
    touched_.clear();
    for (const ScheduledChunk& chunk : plan.chunks) {
        if (chunk.beam <= 0) touched_.push_back(chunk.request);
    }
    if (sampled.ended || std::exchange(cancelled_under_way_, false)) scheduler_.retire_finished();
    hand_over(step.record);
    return true;
}

template <typename Call>
bool Engine::on_device(const StartedStep& step, Call call) {
    std::optional<std::string> failure;
    bool lost = false;
    enter_device(step);
    try {
        call();
    } catch (const DeviceLostError& error) {
        failure = error.what();
        lost = true;
    } catch (const std::exception& error) {
        failure = error.what();
    } catch (...) {
        failure = "an exception of unknown type";
    }
    leave_device();
    if (!failure) return true;
    fail_running(*failure, lost);
    scheduler_.retire_finished();
    StepRecord record = step.record;
    hand_over(record);
    return false;
}

// The device failed, and no step is under way any more.
void Engine::fail_running(const std::string& failure, bool lost) {
    under_way_.plan = nullptr;
    if (lost) throw std::runtime_error("the device is lost: " + failure);
    const std::string message = "the device failed: " + failure;
    if (++failures_in_a_row_ == kMaxDeviceFailures) {
        throw std::runtime_error(message + " (" + std::to_string(kMaxDeviceFailures) + " times in a row)");
    }
    scheduler_.forget_cache();
    touched_.assign(scheduler_.running().begin(), scheduler_.running().end());
    for (Request* request : touched_) {
        if (request->state != RequestState::kFinished) request->finish(FinishReason::kError, message);
    }
}

// From here to leave_device() the engine thread touches nothing but the packed step and its block tables: the
// watchdog may end every request meanwhile.
void Engine::enter_device(const StartedStep& step) {
    const std::lock_guard lock(mutex_);
    on_device_ = step.plan;
    on_device_step_ = step.record.step;
    on_device_since_ = Clock::now();
}

void Engine::leave_device() {
    const std::lock_guard lock(mutex_);
    on_device_ = nullptr;
    if (hung_) throw GivenUp{};
}

// The masks of the tokens that the step will choose; they were asked for when the tokens before became known.
void Engine::take_masks(const StepPlan& plan) {
    if (!plan.needs_host) return;
    for (const ScheduledChunk& chunk : plan.chunks) {
        Request& request = *chunk.request;
        if (!request.constrained() || !chunk.completes()) continue;
        try {
            request.masks = masks_.wait(request.id, request.num_output(), chunk.num_drafts, kMaskPatience);
        } catch (const std::exception& error) {
            request.finish(FinishReason::kError, error.what());
        }
    }
}

void Engine::ask_for_masks(const StepPlan& plan) {
    if (!plan.needs_host) return;
    for (const ScheduledChunk& chunk : plan.chunks) {
        Request& request = *chunk.request;
        if (request.masks.count == 0) continue;  // no token was chosen by one
        request.masks = {};
        if (request.state != RequestState::kDecoding) continue;
        const auto chosen =
            std::span<const int32_t>(request.tokens).subspan(static_cast<size_t>(chunk.end()));
        masks_.ask(request.id, chosen, request.num_output());
    }
}

// Makes the step's news visible to poll() and stats().
void Engine::hand_over(StepRecord& record) {
    bool news = false;
    {
        const std::lock_guard lock(mutex_);
        stats_.prompt_tokens += record.prefill_tokens;
        stats_.prefix_query_tokens += record.queried_tokens;
        stats_.prefix_cached_tokens += record.cached_tokens;
        stats_.recomputed_tokens += record.recomputed_tokens;
        stats_.preemptions += record.preemptions;
        stats_.draft_tokens += record.draft_tokens;
        stats_.accepted_tokens += record.accepted_tokens;
        for (Request* request : touched_) {
            record.finished += request->state == RequestState::kFinished ? 1 : 0;
            stats_.generated_tokens += request->num_public() - request->published;
            if (request->searches()) stats_.generated_tokens += request->num_found();
            publish(*request);
        }
        stats_.device_failures += failures_in_a_row_ > 0 ? 1 : 0;
        stats_.graph_steps += record.graph > 0 ? 1 : 0;
        stats_.device_sampled_steps += record.device_sampled ? 1 : 0;
        stats_.ahead_steps += record.ahead ? 1 : 0;
        news = !outbox_.empty();
        update_gauges();
        record.running = stats_.running;
        record.waiting = stats_.waiting;
        record.kv_blocks_used = stats_.kv_blocks_used;
        record.kv_blocks_cached = stats_.kv_blocks_cached;
        stats_.steps = record.step;
        stats_.last_step = record;
        trace_.add(record);
    }
    if (news) events_.notify_all();
}

// Under mutex_. After this with a finished request, the request may be gone at any time.
void Engine::publish(Request& request) {
    const bool finished = request.state == RequestState::kFinished;
    const bool wanted =
        request.looks_at_tokens && (request.params.context_logits || request.params.prompt_logprobs >= 0);
    const bool context = wanted && !request.published_context && request.context_rows_left == 0;
    if (request.published == request.num_public() && !finished && !context) return;
    if (finished || request.first_token_seconds < 0) request.note_news();
    auto entry = static_cast<size_t>(request.outbox_entry);
    if (entry >= outbox_.size() || outbox_[entry].request != &request) {  // poll() took it away
        entry = outbox_.size();
        request.outbox_entry = static_cast<int>(entry);
        outbox_.push_back({&request, request.published, request.published, false, false});
    }
    News& news = outbox_[entry];
    news.to = request.published = request.num_public();
    news.context |= context;
    news.finished = finished;
    request.published_context |= context;
    request.published_finish = finished;
    if (finished && (request.constrained() || request.params.process_logits)) drop_helpers(request.id);
    if (finished) ++stats_.requests_finished[static_cast<size_t>(request.finish_reason)];
}

void Engine::update_gauges() {
    stats_.running = static_cast<int>(scheduler_.running().size());
    stats_.waiting = scheduler_.waiting().size();
    stats_.waiting_tokens = scheduler_.waiting().num_tokens();
    stats_.blocked = scheduler_.blocked();
    stats_.kv_blocks_total = pool_.total();
    stats_.kv_blocks_used = pool_.used();
    stats_.kv_blocks_cached = pool_.cached();
    stats_.kv_blocks_free = pool_.free();
    stats_.kv_blocks_promised = pool_.promised();
    stats_.kv_blocks_evicted = pool_.evictions();
    if (const WindowPool* windows = pool_.windows()) {
        stats_.window_blocks_total = windows->total();
        stats_.window_blocks_used = windows->used();
        stats_.window_blocks_cached = windows->cached();
        stats_.window_blocks_free = windows->free();
        stats_.window_blocks_promised = windows->promised();
        stats_.window_blocks_evicted = windows->evictions();
    }
    if (const HostTier* tier = tiers_.blocks.get()) {
        stats_.host_blocks_total = tier->total();
        stats_.host_blocks = tier->filled();
        stats_.host_blocks_saved = tier->saved();
        stats_.host_blocks_loaded = tier->loaded();
    }
    if (const HostTier* tier = tiers_.windows.get()) {
        stats_.host_window_blocks_total = tier->total();
        stats_.host_window_blocks = tier->filled();
        stats_.host_window_blocks_saved = tier->saved();
        stats_.host_window_blocks_loaded = tier->loaded();
    }
    stats_.disk_blocks_total = stats_.disk_blocks = 0;
    stats_.disk_blocks_spilled = stats_.disk_blocks_fetched = 0;
    tiers_.all().each([this](const HostTier& tier) {
        stats_.disk_blocks_total += tier.disk_total();
        stats_.disk_blocks += tier.disk_filled();
        stats_.disk_blocks_spilled += tier.spilled();
        stats_.disk_blocks_fetched += tier.fetched();
        if (stats_.disk_error.empty()) stats_.disk_error = tier.disk_error();
    });
}

// Under mutex_: nothing stays unfinished, nothing more is taken.
void Engine::end_requests(FinishReason reason, const std::string& message) {
    stopping_ = true;
    stats_.dead = message;
    for (const auto& [id, request] : live_) {
        if (request->state != RequestState::kFinished) request->finish(reason, message);
        if (!request->published_finish) publish(*request);
    }
    inbox_.clear();
    inbox_tokens_ = 0;
    cancels_.clear();
    ended_ = true;
    events_.notify_all();
    ends_.notify_all();
}

// The loop's last act.
void Engine::end_all(FinishReason reason, const std::string& message) {
    const std::lock_guard lock(mutex_);
    end_requests(reason, message);
    scheduler_.abandon();
    update_gauges();
}

// --- the watchdog ---

void Engine::watch() {
    pthread_setname_np(pthread_self(), "castiron-watch");
    const std::chrono::duration<double> limit(options_.watchdog_seconds);
    std::unique_lock lock(mutex_);
    while (!ends_.wait_for(lock, limit / 4, [this] { return ended_; })) {
        const std::chrono::duration<double> since = Clock::now() - on_device_since_;
        if (on_device_ == nullptr || since < limit) continue;
        give_up(since.count());
        return;
    }
}

// Under mutex_, while the engine thread waits for the device. What it uses stays as it is.
void Engine::give_up(double seconds) {
    hung_ = true;
    stats_.stall_report =
        describe_stall(on_device_step_, seconds, *on_device_, scheduler_, pool_, trace_.last(kReportedSteps));
    std::fputs(stats_.stall_report.c_str(), stderr);
    end_requests(FinishReason::kError, "step " + std::to_string(on_device_step_) +
                                           " has been on the device for " + std::to_string(seconds) +
                                           " s, and watchdog_timeout is " +
                                           std::to_string(options_.watchdog_seconds) + " s");
    stats_.running = stats_.waiting = 0;
    stats_.waiting_tokens = 0;
}

}  // namespace castiron
