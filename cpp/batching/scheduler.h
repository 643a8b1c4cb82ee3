// What runs in the next step.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "batching/request.h"
#include "kv/block_pool.h"

namespace castiron {

struct SchedulerLimits {
    int max_batch_size = 0;       // requests running at a time
    int max_num_tokens = 0;       // tokens in a step: decodes and prefill chunks together
    int max_logit_rows = 0;       // rows of logits in a step
    int max_seq_len = 0;          // prompt and output of one request
    int max_loras = 0;            // different adapters running at a time
    int kv_window = 0;            // how far back attention looks, in tokens; 0: to the beginning
    bool window_of_some = false;  // in some layers; to the beginning in others

    [[nodiscard]] KvWindow window() const { return {kv_window, max_num_tokens, window_of_some}; }
};

// What is promised to a request that starts to run.
enum class CapacityPolicy : uint8_t {
    kGuaranteedNoEvict,  // the KV blocks of its whole life: once it runs, it runs to its end
    kMaxUtilization,     // those of what it has to compute now; it grows, and others may have to give way
};

// A request's part of a step: its next pending tokens, and behind them its drafts; num_tokens together. The
// last num_logits of them want logits.
struct ScheduledChunk {
    Request* request = nullptr;
    int num_tokens = 0;
    int num_logits = 0;
    int beam = -1;  // of a beam search, once the prompt is computed; its beams lie side by side, 0 first
    int num_drafts = 0;
    int request_pending = 0;  // tokens that the request has pending before the step
    int start = 0;            // position of the first of its tokens
    int row = 0;              // of the step's logits: the first of its own
    bool plain = false;       // a decode of a plain request

    [[nodiscard]] const int32_t* tokens() const {
        if (beam >= 0) return &request->beams->search.output(beam).back();
        return request->tokens.data() + start;
    }
    [[nodiscard]] std::span<const int32_t> blocks() const {
        return beam >= 0 ? request->beams->tables.blocks(beam) : request->blocks_of(start + num_tokens);
    }
    // The window blocks of blocks(), where some layers have a window.
    [[nodiscard]] std::span<const int32_t> windows() const {
        return beam >= 0 ? request->beams->tables.windows(beam) : request->windows_of(start + num_tokens);
    }
    // No other chunk of its request comes behind it.
    [[nodiscard]] bool last_of_request() const {
        return beam < 0 || beam + 1 == request->beams->search.num_live();
    }
    [[nodiscard]] int num_pending() const { return num_tokens - num_drafts; }
    // All pending tokens are fed, so the last one's logits give the next token.
    [[nodiscard]] bool completes() const { return num_pending() == request_pending; }
    // Positions that the KV cache holds behind the step, without drafts.
    [[nodiscard]] int end() const { return start + num_pending(); }
};

struct StepPlan {
    std::vector<ScheduledChunk> chunks;  // decodes first
    std::vector<BlockMove> moves;        // to be made in this order, before the step
    int num_tokens = 0;
    int num_logit_rows = 0;
    int num_decodes = 0;
    int num_drafts = 0;         // of num_tokens
    bool needs_host = false;    // a request in it does
    int queried_tokens = 0;     // prompt tokens that were looked for in the cache
    int cached_tokens = 0;      //               that were found there
    int recomputed_tokens = 0;  // of num_tokens: computed before, and lost by a preemption
    int preemptions = 0;

    [[nodiscard]] int num_prefill_tokens() const { return num_tokens - num_decodes - num_drafts; }
};

// Room in the KV cache.
struct KvNeed {
    int blocks = 0;
    int windows = 0;  // window blocks, where some layers have a window

    [[nodiscard]] bool within(const KvNeed& room) const {
        return blocks <= room.blocks && windows <= room.windows;
    }
};

enum class Blocked : uint8_t { kNothing, kBatchSize, kKvBlocks, kNumTokens, kAdapters };

// Requests are served by priority (smaller numbers first), then in the order of arrival.
//
// - The first of the queue is admitted when the KV blocks that the capacity policy asks for can be promised
//   to it, the step has a token left for it, and its adapter is one of at most max_loras that run. Nobody
//   overtakes it.
// - At most min(max_batch_size, max_num_tokens, max_logit_rows) requests run, where a beam search counts as
//   many as it is wide, so every step has room for one token of each: a decode is never left out, and while
//   any prompt is unfinished at least one of its tokens goes in.
// - What the prefix cache holds of a request is not computed: looked for when it is admitted and again before
//   every chunk of its prefill. A request whose next block is computed by another one in this step waits for
//   it and shares it.
// - Under kMaxUtilization a decoding request that lacks a block gets it from the running request of the
//   lowest priority and, among those, with the least computed, which goes back to the queue with its tokens
//   and its place in the order; nobody is admitted in that step. The first of the running is never the one,
//   so it reaches its end, and every request is the first at some time. A waiting request takes the place of
//   running ones of lower priority, but not that of their adapter. A beam search is promised all it can need
//   under either policy and is never set back: its beams would each have to be computed again.
//
// - What is left of a step's tokens and rows of logits may go to drafts of the decoding requests, never a KV
//   block that somebody else was promised or could need to grow by.
//
// - Of a model whose every layer has a sliding window a request gives back the blocks behind it as it goes,
//   and is promised no more than it holds at a time; where some layers have one, the same is so of window
//   blocks. A beam search keeps all.
//
// So every step moves every decoding request and the first prefill; there is no deadlock, no starvation among
// equals and no idle step.
//
// A step can be planned while the one before it is under way (schedule_ahead), whose tokens count as pending
// ones by then. Steps run in order, so what one writes to the KV cache the next may read, and a block that
// one gave back may be another's in the next. A request that turns out to have ended has a row in the step
// planned ahead, which is nobody's then.
//
// Not thread-safe: the engine thread owns it. Allocates in the constructor only.
class Scheduler {
public:
    // max_waiting: requests that the queue holds without allocating.
    Scheduler(const SchedulerLimits& limits, BlockPool& pool,
              CapacityPolicy policy = CapacityPolicy::kGuaranteedNoEvict, size_t max_waiting = 1024);

    // Throws std::invalid_argument, with the numbers, when the request could never run. Safe on any thread.
    void check_can_ever_run(int prompt_tokens, int max_new_tokens, int beam_width = 0) const;

    void enqueue(Request& request) { waiting_.push(request); }
    // The next step, no other being under way; empty chunks only when nothing is left to do. A plan is valid
    // until the call after the next.
    [[nodiscard]] const StepPlan& schedule();
    // The requests of the plan that schedule() made to which guesses may be of use.
    [[nodiscard]] std::span<const DraftWish> draft_wishes(Drafter& drafter);
    // Tokens that the plan still has room for, with logits.
    [[nodiscard]] int rows_left() const {
        return std::min(limits_.max_num_tokens - plan_->num_tokens,
                        limits_.max_logit_rows - plan_->num_logit_rows);
    }
    // Adds to the plan what was drafted for them.
    void add_drafts();
    // The step behind the one under way, planned last and started. None where that one's tokens must be known
    // first: a request looks at them (Request::needs_host), has to give way to another, or all of them end.
    [[nodiscard]] const StepPlan* schedule_ahead();
    // The plan was carried out: its full blocks enter the prefix cache. failed: some of its requests ended
    // with an error.
    void keep_computed(const StepPlan& plan, bool failed);
    // The plan failed on the device, and nobody knows what the KV cache holds.
    void forget_cache();
    // Takes finished requests out of the running set, and out of the plan made ahead, and gives their KV
    // blocks back.
    void retire_finished();
    // Takes one request out, wherever it is. Its state must be kFinished.
    void remove(Request& request);
    // Lets go of everything. No throw: for an engine that ends.
    void abandon() noexcept;

    [[nodiscard]] std::span<Request* const> running() const { return running_; }
    [[nodiscard]] const RequestQueue& waiting() const { return waiting_; }
    // What keeps the first waiting request from running.
    [[nodiscard]] Blocked blocked() const { return blocked_; }

private:
    void begin_plan();
    void slide_fed();
    void fill_plan();
    void add_copy(const BlockCopy& copy);
    void drop_finished();
    void stop_running(Request& request);
    void reuse(Request& request);
    [[nodiscard]] bool computed_by_another(const Request& request) const;
    void count_cached(Request& request, int tokens);
    void add_tokens(Request& request, int tokens, int logits, int beam = -1);
    void add_decode(Request& request);
    void add_beams(Request& request);
    void keep_chunk(const ScheduledChunk& chunk);
    void follow_beams(Request& request);
    void add_chunk(Request& request);
    [[nodiscard]] bool reserve_next(Request& request);
    void add_prefill(Request& request);
    [[nodiscard]] int draft_room(const Request& request, int most) const;
    [[nodiscard]] int place_drafts(Request& request);

    // scheduler_admission.cc
    void admit();
    [[nodiscard]] bool has_place_for(const Request& request) const {
        return running_.size() + extra_beams_ + static_cast<size_t>(request.width()) <= max_running_;
    }
    [[nodiscard]] bool has_place_for_adapter(const Request& request);
    [[nodiscard]] bool open(Request& request);
    [[nodiscard]] bool promise_blocks(Request& request);
    [[nodiscard]] KvNeed growth() const;
    [[nodiscard]] KvNeed needs(int prompt_tokens, int tokens, int beam_width) const;
    [[nodiscard]] KvNeed available() const;
    [[nodiscard]] bool has_room_ahead();
    void make_room();
    void make_room_for(const Request& request);
    void preempt(size_t running);
    [[nodiscard]] size_t victim(size_t first) const;

    SchedulerLimits limits_;
    BlockPool& pool_;
    CapacityPolicy policy_;
    KvNeed most_;  // that one request can be promised; on any thread
    size_t max_running_;
    RequestQueue waiting_;
    std::vector<Request*> running_;         // in the order in which they are served
    int host_bound_ = 0;                    // of them: those that need the host between steps
    size_t extra_beams_ = 0;                // sequences that they may run besides one each
    std::vector<const Adapter*> adapters_;  // of the running, each once; of the last look alone
    std::vector<Request*> fed_;             // of the running: those that the step before fed several tokens
    std::vector<DraftWish> wishes_;
    Drafter* drafter_ = nullptr;  // the one that was last asked
    std::array<StepPlan, 2> plans_;
    StepPlan* plan_ = &plans_[0];          // made last
    const StepPlan* under_way_ = nullptr;  // the step that ran when plan_ was made ahead
    bool unused_ = false;                  // plan_ is of nobody, and what it copies and counts is still to do
    Blocked blocked_ = Blocked::kNothing;
    bool lacks_blocks_ = false;  // in this step a decoding request took the blocks of another
    // The request that could not be opened at the last try, what was available then, and the tries since.
    const Request* refused_ = nullptr;
    KvNeed refused_available_;
    int refused_steps_ = 0;
};

}  // namespace castiron
