#include "batching/scheduler.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace castiron {

Scheduler::Scheduler(const SchedulerLimits& limits, BlockPool& pool)
    : limits_(limits),
      pool_(pool),
      total_blocks_(pool.total()),
      max_running_(static_cast<size_t>(
          std::min({limits.max_batch_size, limits.max_num_tokens, limits.max_logit_rows}))) {
    if (max_running_ < 1) throw std::invalid_argument("every limit of the scheduler must be at least 1");
    running_.reserve(max_running_);
    plan_.chunks.reserve(max_running_);
}

void Scheduler::check_can_ever_run(int prompt_tokens, int max_new_tokens) const {
    const int cached = prompt_tokens + std::max(max_new_tokens - 1, 0);
    const int needed = blocks_for_tokens(cached);
    if (needed > total_blocks_) {
        throw std::invalid_argument(
            "the request needs " + std::to_string(needed) + " KV blocks (" + std::to_string(prompt_tokens) +
            " prompt tokens + " + std::to_string(max_new_tokens) + " to generate), the cache has " +
            std::to_string(total_blocks_) + "; shorten the request or raise kv_cache_blocks");
    }
}

const StepPlan& Scheduler::schedule() {
    plan_.chunks.clear();
    plan_.num_tokens = plan_.num_logit_rows = plan_.num_decodes = 0;
    for (Request* request : running_) {
        if (request->state == RequestState::kDecoding) add_chunk(*request);
    }
    plan_.num_decodes = static_cast<int>(plan_.chunks.size());
    for (Request* request : running_) {
        if (request->state == RequestState::kPrefilling) add_chunk(*request);
    }
    admit();
    return plan_;
}

void Scheduler::admit() {
    blocked_ = Blocked::kNothing;
    while (!waiting_.empty()) {
        Request& request = *waiting_.front();
        if (running_.size() == max_running_) {
            blocked_ = Blocked::kBatchSize;
            return;
        }
        if (!request.block_table.open(pool_)) {
            blocked_ = Blocked::kKvBlocks;
            return;
        }
        waiting_.remove(request);
        request.state = RequestState::kPrefilling;
        running_.push_back(&request);
        add_chunk(request);
    }
}

// As much of the request as the budgets still hold; nothing when they are spent.
void Scheduler::add_chunk(Request& request) {
    const int pending = request.num_pending();
    const int rows_left = limits_.max_logit_rows - plan_.num_logit_rows;
    int tokens = std::min(pending, limits_.max_num_tokens - plan_.num_tokens);
    int logits = 0;
    if (request.params.context_logits && request.num_computed < request.prompt_tokens) {
        tokens = logits = std::min(tokens, rows_left);
    } else if (tokens == pending) {
        if (rows_left > 0) {
            logits = 1;
        } else {
            --tokens;  // the last token waits for a step that has a row for its logits
        }
    }
    if (tokens <= 0) return;
    request.block_table.grow(pool_, request.num_computed + tokens);
    plan_.chunks.push_back({&request, tokens, logits});
    plan_.num_tokens += tokens;
    plan_.num_logit_rows += logits;
}

void Scheduler::retire_finished() {
    std::erase_if(running_, [this](Request* request) {
        if (request->state != RequestState::kFinished) return false;
        request->block_table.close(pool_);
        return true;
    });
}

void Scheduler::abandon() noexcept {
    while (!waiting_.empty()) waiting_.remove(*waiting_.front());
    for (Request* request : running_) {
        try {
            request->block_table.close(pool_);
        } catch (const std::logic_error&) {
            // The accounting is what broke; there is nothing left to protect.
        }
    }
    running_.clear();
}

void Scheduler::remove(Request& request) {
    const auto running = std::find(running_.begin(), running_.end(), &request);
    if (running == running_.end()) {
        waiting_.remove(request);
    } else {
        running_.erase(running);
        request.block_table.close(pool_);
    }
}

}  // namespace castiron
