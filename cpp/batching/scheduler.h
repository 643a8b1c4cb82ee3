// What runs in the next step.
#pragma once

#include <span>
#include <vector>

#include "batching/request.h"
#include "kv/block_pool.h"

namespace castiron {

struct SchedulerLimits {
    int max_batch_size = 0;  // requests running at a time
    int max_num_tokens = 0;  // tokens in a step: decodes and prefill chunks together
    int max_logit_rows = 0;  // rows of logits in a step
    int max_seq_len = 0;     // prompt and output of one request
};

// A request's part of a step: its next num_tokens pending tokens. The last num_logits of them want logits.
struct ScheduledChunk {
    Request* request = nullptr;
    int num_tokens = 0;
    int num_logits = 0;

    // All pending tokens are fed, so the last row's logits give the next token.
    [[nodiscard]] bool completes() const { return num_tokens == request->num_pending(); }
};

struct StepPlan {
    std::vector<ScheduledChunk> chunks;
    int num_tokens = 0;
    int num_logit_rows = 0;
    int num_decodes = 0;
};

enum class Blocked : uint8_t { kNothing, kBatchSize, kKvBlocks };

// First come, first served, guaranteed no evict:
//
// - A request is admitted, in the order of arrival, when the KV blocks of its whole life (prompt +
// max_new_tokens)
//   can be promised to it. Nobody overtakes the first in the queue, so nobody starves.
// - At most min(max_batch_size, max_num_tokens, max_logit_rows) requests run, so every step has room for one
// token
//   of each: a decode is never left out, and while any prompt is unfinished at least one of its tokens goes
//   in.
//
// So every step moves every decoding request and the oldest prefill; there is no deadlock and no idle step.
// Not thread-safe: the engine thread owns it. Allocates in the constructor only.
class Scheduler {
public:
    Scheduler(const SchedulerLimits& limits, BlockPool& pool);

    // Throws std::invalid_argument, with the numbers, when the request could never run. Safe on any thread.
    void check_can_ever_run(int prompt_tokens, int max_new_tokens) const;

    void enqueue(Request& request) { waiting_.push_back(request); }
    // The next step; empty chunks only when nothing is left to do. Valid until the next call.
    [[nodiscard]] const StepPlan& schedule();
    // Takes finished requests out of the running set and gives their KV blocks back.
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
    void admit();
    void add_chunk(Request& request);

    SchedulerLimits limits_;
    BlockPool& pool_;
    int total_blocks_;
    size_t max_running_;
    RequestQueue waiting_;
    std::vector<Request*> running_;  // in order of admission
    StepPlan plan_;
    Blocked blocked_ = Blocked::kNothing;
};

}  // namespace castiron
