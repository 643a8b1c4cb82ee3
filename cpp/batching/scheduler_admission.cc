// Who runs: requests are admitted, and under kMaxUtilization give way to each other.
#include <algorithm>
#include <optional>
#include <stdexcept>

#include "batching/scheduler.h"

namespace castiron {
namespace {

// The longest cached prefix of a refused request is looked for again after so many steps, or when more blocks
// are available: a long prompt takes as long as the rest of a step.
constexpr int kStepsBetweenTries = 16;

}  // namespace

void Scheduler::admit() {
    blocked_ = Blocked::kNothing;
    while (!waiting_.empty()) {
        Request& request = *waiting_.front();
        if (under_way_ != nullptr && request.needs_host()) return;
        if (lacks_blocks_) {
            blocked_ = Blocked::kKvBlocks;
        } else if (!has_place_for(request)) {
            blocked_ = Blocked::kBatchSize;
        } else if (plan_->num_tokens == limits_.max_num_tokens) {
            blocked_ = Blocked::kNumTokens;
        } else if (!has_place_for_adapter(request)) {
            blocked_ = Blocked::kAdapters;
        } else if (!open(request)) {
            blocked_ = Blocked::kKvBlocks;
        }
        if (blocked_ != Blocked::kNothing) return;
        waiting_.remove(request);
        request.state = RequestState::kPrefilling;
        request.note_start();
        running_.insert(std::upper_bound(running_.begin(), running_.end(), &request,
                                         [](const Request* a, const Request* b) { return a->before(*b); }),
                        &request);
        extra_beams_ += static_cast<size_t>(request.width() - 1);
        host_bound_ += request.needs_host() ? 1 : 0;
        add_prefill(request);
    }
}

// Whether the request's adapter runs already, or may run besides those that do.
bool Scheduler::has_place_for_adapter(const Request& request) {
    const Adapter* mine = request.adapter.get();
    if (mine == nullptr) return true;
    adapters_.clear();
    for (const Request* other : running_) {
        const Adapter* adapter = other->adapter.get();
        if (adapter == mine) return true;
        if (adapter == nullptr || std::find(adapters_.begin(), adapters_.end(), adapter) != adapters_.end())
            continue;
        adapters_.push_back(adapter);
    }
    return static_cast<int>(adapters_.size()) < limits_.max_loras;
}

// Blocks for a request that is to run: those that the cache has for it and promises for the rest.
bool Scheduler::open(Request& request) {
    if (&request == refused_ && !running_.empty() && available().within(refused_available_) &&
        ++refused_steps_ % kStepsBetweenTries != 0) {
        return false;
    }
    std::optional<BlockCopy> copy;  // none without a promise
    const int found = request.block_table.reuse(pool_, request.reusable(), 0, copy);
    if (!promise_blocks(request)) {
        request.give_back(pool_);
        refused_ = &request;
        refused_available_ = available();
        return false;
    }
    refused_ = nullptr;
    refused_steps_ = 0;
    request.num_computed = found;
    if (request.block_table.cache_use().enabled && request.most_computed == 0) {
        plan_->queried_tokens += request.prompt_tokens;
    }
    count_cached(request, found);
    return true;
}

bool Scheduler::promise_blocks(Request& request) {
    const int life = request.max_cached_tokens();
    if (request.beams != nullptr) {
        return request.block_table.reserve(pool_, request.prompt_tokens) &&
               request.beams->tables.reserve(pool_);
    }
    if (policy_ == CapacityPolicy::kGuaranteedNoEvict) return request.block_table.reserve(pool_, life);
    // With a block to grow by for each of the others: whoever comes must not drive somebody out at once.
    return request.block_table.reserve(pool_, std::min(request.num_tokens() + 1, life)) &&
           growth().within(available());
}

// A block for every running request.
KvNeed Scheduler::growth() const {
    const auto windows = std::count_if(running_.begin(), running_.end(), [](const Request* request) {
        return request->block_table.windows().wants_more();
    });
    return {static_cast<int>(running_.size()), static_cast<int>(windows)};
}

KvNeed Scheduler::available() const {
    return {pool_.available(), pool_.windows() != nullptr ? pool_.windows()->available() : 0};
}

// What a request whose sequences come to so many tokens is promised. On any thread.
KvNeed Scheduler::needs(int prompt_tokens, int tokens, int beam_width) const {
    const KvWindow window = limits_.window();
    KvNeed need{window.most_blocks(tokens), window.most_window_blocks(blocks_for_tokens(tokens))};
    if (beam_width > 0) {
        need.blocks =
            blocks_for_tokens(prompt_tokens) + BeamTables::blocks_for(beam_width, prompt_tokens, tokens);
        need.windows = need.blocks;
    }
    if (!window.of_some) need.windows = 0;
    return need;
}

// A promise for the place of a decoding request's next token.
bool Scheduler::reserve_next(Request& request) {
    request.block_table.slide(pool_, request.num_computed);
    return request.block_table.reserve(pool_, request.num_computed + 1);
}

// Whether the next token of every decoding request has a place in the cache and nobody who waits is to take
// the place of a running request.
bool Scheduler::has_room_ahead() {
    for (Request* request : running_) {
        if (request->decodes() && !reserve_next(*request)) return false;
    }
    return waiting_.empty() || running_.empty() ||
           running_.back()->priority() <= waiting_.front()->priority();
}

// A place in the cache for the next token of every decoding request.
void Scheduler::make_room() {
    for (size_t i = 0; i < running_.size();) {
        Request& request = *running_[i];
        if (!request.decodes() || request.beams != nullptr || reserve_next(request)) {
            ++i;
            continue;
        }
        if (running_.size() == 1) throw std::logic_error("one request alone lacks KV blocks");
        size_t gone = victim(1);
        if (gone == running_.size()) gone = i;  // all others are beam searches, which end without its help
        preempt(gone);
        lacks_blocks_ = true;
        if (gone < i) --i;
    }
    // Whoever comes after somebody had to go would only drive out the next.
    if (plan_->preemptions > 0 || waiting_.empty()) return;
    if (has_place_for_adapter(*waiting_.front())) make_room_for(*waiting_.front());
}

// Running requests of lower priority give way to one that waits, unless it would not be enough.
void Scheduler::make_room_for(const Request& request) {
    // A beam search is promised all at once.
    const int tokens = request.beams != nullptr
                           ? request.max_cached_tokens()
                           : std::min(request.num_tokens() + 1, request.max_cached_tokens());
    const KvNeed need = needs(request.prompt_tokens, tokens, request.params.beam_width);
    KvNeed within_reach = available();
    for (const Request* other : running_) {
        if (other->priority() <= request.priority() || other->beams != nullptr) continue;
        within_reach.blocks += other->block_table.num_blocks();
        within_reach.windows += other->block_table.windows().promised();
    }
    if (!need.within(within_reach)) return;
    for (;;) {
        const KvNeed others = growth();
        const KvNeed needed{need.blocks + others.blocks, need.windows + others.windows};
        if (has_place_for(request) && needed.within(available())) return;
        const size_t gone = victim(0);
        if (gone == running_.size() || running_[gone]->priority() <= request.priority()) return;
        preempt(gone);
    }
}

// Of the running requests from `first` on that can be set back: of the lowest priority the one that loses
// least; running_.size() when there is none.
size_t Scheduler::victim(size_t first) const {
    size_t best = running_.size();
    for (size_t i = running_.size(); i-- > first;) {
        if (running_[i]->beams != nullptr) continue;
        if (best == running_.size()) best = i;
        if (running_[i]->priority() != running_[best]->priority()) break;
        if (running_[i]->num_computed < running_[best]->num_computed) best = i;
    }
    return best;
}

void Scheduler::preempt(size_t running) {
    Request& request = *running_[running];
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(running));
    stop_running(request);
    request.most_computed = std::max(request.most_computed, request.num_computed);
    request.num_computed = 0;
    request.state = RequestState::kWaiting;
    waiting_.push(request);
    ++request.preemptions;
    ++plan_->preemptions;
}

}  // namespace castiron
