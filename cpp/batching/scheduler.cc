#include "batching/scheduler.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace castiron {
namespace {

// Whether the chunk fills the block behind `path`, which begins at position `begin` and holds `part`.
bool fills(const ScheduledChunk& chunk, const BlockTable& path, int begin, std::span<const int32_t> part) {
    const Request& other = *chunk.request;
    const BlockTable& theirs = other.block_table;
    if (theirs.num_cached() != path.num_cached() || chunk.start >= begin + kBlockTokens ||
        std::min(chunk.end(), other.num_tokens()) < begin + kBlockTokens || !theirs.cache_use().enabled) {
        return false;
    }
    const auto parent = static_cast<size_t>(begin / kBlockTokens) - 1;
    const bool same_path = begin > 0 ? theirs.blocks()[parent] == path.blocks()[parent]
                                     : theirs.cache_use().salt == path.cache_use().salt;
    return same_path && std::equal(part.begin(), part.end(), other.tokens.begin() + begin);
}

}  // namespace

Scheduler::Scheduler(const SchedulerLimits& limits, BlockPool& pool, CapacityPolicy policy,
                     size_t max_waiting)
    : limits_(limits),
      pool_(pool),
      policy_(policy),
      most_{pool.total(), pool.windows() != nullptr ? pool.windows()->most() : 0},
      max_running_(static_cast<size_t>(
          std::max(0, std::min({limits.max_batch_size, limits.max_num_tokens, limits.max_logit_rows})))),
      waiting_(max_waiting + max_running_) {
    if (max_running_ < 1) throw std::invalid_argument("every limit of the scheduler must be at least 1");
    running_.reserve(max_running_);
    adapters_.reserve(max_running_);
    wishes_.reserve(max_running_);
    fed_.reserve(max_running_);
    for (StepPlan& plan : plans_) {
        plan.chunks.reserve(max_running_);
        plan.moves.reserve(4 * max_running_ + pool.most_moves());
    }
}

void Scheduler::check_can_ever_run(int prompt_tokens, int max_new_tokens, int beam_width) const {
    const int cached = prompt_tokens + std::max(max_new_tokens - 1, 0);
    if (beam_width > 0 && static_cast<size_t>(beam_width) > max_running_) {
        throw std::invalid_argument("the beam search is " + std::to_string(beam_width) +
                                    " beams wide, and this engine runs at most " +
                                    std::to_string(max_running_) + " sequences at a time");
    }
    const KvNeed need = needs(prompt_tokens, cached, beam_width);
    if (need.blocks > most_.blocks) {
        throw std::invalid_argument("the request needs " + std::to_string(need.blocks) + " KV blocks (" +
                                    std::to_string(prompt_tokens) + " prompt tokens + " +
                                    std::to_string(max_new_tokens) + " to generate), the cache has " +
                                    std::to_string(most_.blocks) +
                                    "; shorten the request or raise kv_cache_blocks");
    }
    if (need.windows > most_.windows) {
        throw std::invalid_argument(
            "the request reads " + std::to_string(need.windows) +
            " blocks of the layers with a window at a time (" + std::to_string(prompt_tokens) +
            " prompt tokens + " + std::to_string(max_new_tokens) + " to generate), and the cache has " +
            std::to_string(most_.windows) + "; shorten the request or raise kv_cache_blocks");
    }
}

const StepPlan& Scheduler::schedule() {
    under_way_ = nullptr;
    begin_plan();
    if (policy_ == CapacityPolicy::kMaxUtilization) make_room();
    fill_plan();
    return *plan_;
}

const StepPlan* Scheduler::schedule_ahead() {
    if (host_bound_ > 0 || (!waiting_.empty() && waiting_.front()->needs_host())) return nullptr;
    if (policy_ == CapacityPolicy::kMaxUtilization && !has_room_ahead()) return nullptr;
    under_way_ = plan_;
    begin_plan();
    fill_plan();
    unused_ = plan_->chunks.empty();
    return unused_ ? nullptr : plan_;
}

void Scheduler::begin_plan() {
    lacks_blocks_ = false;
    slide_fed();
    if (std::exchange(unused_, false)) return;
    plan_ = plan_ == &plans_[0] ? &plans_[1] : &plans_[0];
    plan_->chunks.clear();
    plan_->moves.clear();
    plan_->num_tokens = plan_->num_logit_rows = plan_->num_decodes = plan_->num_drafts = 0;
    plan_->needs_host = false;
    plan_->queried_tokens = plan_->cached_tokens = plan_->recomputed_tokens = plan_->preemptions = 0;
}

// What a step feeds its requests lies in window blocks that are set aside for the chunks of one step: nobody
// may keep them into the next.
void Scheduler::slide_fed() {
    for (Request* request : fed_) request->block_table.slide(pool_, request->num_computed);
    fed_.clear();
}

void Scheduler::fill_plan() {
    size_t decoding = 0;
    for (Request* request : running_) {
        if (!request->decodes()) continue;
        ++decoding;
        add_decode(*request);
    }
    plan_->num_decodes = static_cast<int>(plan_->chunks.size());
    if (decoding < running_.size()) {
        for (Request* request : running_) {
            if (request->state == RequestState::kPrefilling && request->num_pending() > 0) {
                add_prefill(*request);
            }
        }
    }
    admit();
    pool_.take_moves(plan_->moves);
}

// What the pool wants moved by now comes first: it may make the block's place.
void Scheduler::add_copy(const BlockCopy& copy) {
    pool_.take_moves(plan_->moves);
    plan_->moves.push_back({BlockMove::Kind::kCopy, copy.from, copy.to});
    if (pool_.windows() == nullptr) return;
    plan_->moves.push_back(
        {BlockMove::Kind::kCopy, pool_.window_of(copy.from), pool_.window_of(copy.to), KvGroup::kWindow});
}

void Scheduler::forget_cache() {
    pool_.forget_all();
    for (StepPlan& plan : plans_) {
        pool_.take_moves(plan.moves);
        plan.moves.clear();
    }
    pool_.tiers().each([](HostTier& tier) { tier.abandon_moves(); });
}

// What is left to do for a request that has just left running_.
void Scheduler::stop_running(Request& request) {
    extra_beams_ -= static_cast<size_t>(request.width() - 1);
    host_bound_ -= request.needs_host() ? 1 : 0;
    request.give_back(pool_);
    std::erase(fed_, &request);
    request.drafts.clear();
    if (drafter_ != nullptr && request.draft_state != nullptr) drafter_->release(request);
}

void Scheduler::count_cached(Request& request, int tokens) {
    if (request.most_computed > 0) return;  // back from a preemption: its own blocks
    request.cached_tokens += tokens;
    plan_->cached_tokens += tokens;
}

// Skips what has come into the cache since the last look.
void Scheduler::reuse(Request& request) {
    std::optional<BlockCopy> copy;
    const int before = request.num_computed;
    request.num_computed = request.block_table.reuse(pool_, request.reusable(), before, copy);
    if (copy) add_copy(*copy);
    count_cached(request, request.num_computed - before);
}

// Whether a chunk of this step, or of the one under way, fills the very block that the request needs next.
// All full blocks of the other request are in the prefix tree or filled by that step, and equal paths there
// are equal blocks.
bool Scheduler::computed_by_another(const Request& request) const {
    const BlockTable& table = request.block_table;
    const int begin = table.num_cached() * kBlockTokens;
    const auto tokens = request.reusable();
    if (!table.cache_use().enabled || static_cast<size_t>(begin) + kBlockTokens > tokens.size() ||
        request.num_computed >= begin + kBlockTokens) {
        return false;
    }
    const auto part = tokens.subspan(static_cast<size_t>(begin), kBlockTokens);
    const auto by = [&](const StepPlan& plan) {
        return std::any_of(plan.chunks.begin() + plan.num_decodes, plan.chunks.end(),
                           [&](const ScheduledChunk& chunk) { return fills(chunk, table, begin, part); });
    };
    return by(*plan_) || (under_way_ != nullptr && by(*under_way_));
}

void Scheduler::add_prefill(Request& request) {
    if (plan_->num_tokens == limits_.max_num_tokens) return;
    reuse(request);
    if (!computed_by_another(request)) add_chunk(request);
}

// One token and its logits: max_running_ leaves room for that of every running request. Only the first token
// of a block needs one.
void Scheduler::add_decode(Request& request) {
    if (request.searches()) return add_beams(request);
    if (request.num_computed % kBlockTokens == 0) {
        request.block_table.slide(pool_, request.num_computed);
        request.block_table.grow(pool_, request.num_computed + 1);
    }
    add_tokens(request, 1, 1);
}

void Scheduler::add_tokens(Request& request, int tokens, int logits, int beam) {
    StepPlan& plan = *plan_;
    plan.chunks.push_back({&request, tokens, logits, beam, 0, request.num_pending(), request.num_computed,
                           plan.num_logit_rows, request.state == RequestState::kDecoding && request.plain()});
    plan.num_tokens += tokens;
    plan.num_logit_rows += logits;
    plan.needs_host |= request.needs_host();
}

void Scheduler::add_beams(Request& request) {
    BeamTables& tables = request.beams->tables;
    for (const BlockCopy& copy : tables.copies()) add_copy(copy);
    tables.grow(pool_, request.num_computed + 1);
    const int live = request.beams->search.num_live();
    for (int beam = 0; beam < live; ++beam) add_tokens(request, 1, 1, beam);
}

// As much of the request as the budgets still hold; nothing when they are spent.
void Scheduler::add_chunk(Request& request) {
    const int pending = request.num_pending();
    const int rows_left = limits_.max_logit_rows - plan_->num_logit_rows;
    int tokens = std::min(pending, limits_.max_num_tokens - plan_->num_tokens);
    int logits = 0;
    if (request.wants_context_logits()) {
        tokens = logits = std::min(tokens, rows_left);
    } else if (tokens == pending) {
        if (rows_left > 0) {
            logits = 1;
        } else {
            --tokens;  // the last token waits for a step that has a row for its logits
        }
    }
    if (tokens <= 0) return;
    request.block_table.slide(pool_, request.num_computed);
    request.block_table.grow(pool_, request.num_computed + tokens);
    if (tokens > 1 && pool_.windows() != nullptr) fed_.push_back(&request);
    add_tokens(request, tokens, logits);
    plan_->recomputed_tokens +=
        std::max(0, std::min(request.num_computed + tokens, request.most_computed) - request.num_computed);
}

std::span<const DraftWish> Scheduler::draft_wishes(Drafter& drafter) {
    drafter_ = &drafter;
    wishes_.clear();
    for (int i = 0; i < plan_->num_decodes; ++i) {
        Request& request = *plan_->chunks[static_cast<size_t>(i)].request;
        const int room = draft_room(request, std::min(rows_left(), drafter.max_tokens()));
        if (room > 0) wishes_.push_back({&request, room});
    }
    return wishes_;
}

void Scheduler::add_drafts() {
    for (int i = 0; i < plan_->num_decodes; ++i) {
        ScheduledChunk& chunk = plan_->chunks[static_cast<size_t>(i)];
        chunk.num_drafts = place_drafts(*chunk.request);
        chunk.num_tokens += chunk.num_drafts;
        chunk.num_logits += chunk.num_drafts;
        plan_->num_drafts += chunk.num_drafts;
    }
    pool_.take_moves(plan_->moves);
    plan_->num_tokens += plan_->num_drafts;
    plan_->num_logit_rows = 0;
    for (ScheduledChunk& chunk : plan_->chunks) {
        chunk.row = plan_->num_logit_rows;
        plan_->num_logit_rows += chunk.num_logits;
    }
}

// The most guesses of use to a decoding request. The step itself gives a token behind the last right one.
// Changed logits come from outside for one token at a time.
int Scheduler::draft_room(const Request& request, int most) const {
    if (request.draft_state == nullptr || request.params.process_logits) return 0;
    if (request.params.num_speculative_tokens >= 0) {
        most = std::min(most, request.params.num_speculative_tokens);
    }
    return std::min(most, request.max_new_tokens - request.num_output() - 1);
}

// Room in the KV cache for the request's drafts, or for as many of them as its blocks hold.
int Scheduler::place_drafts(Request& request) {
    if (request.drafts.empty()) return 0;
    BlockTable& table = request.block_table;
    table.slide(pool_, request.num_computed);
    const int fed = request.num_computed + 1;
    int tokens = fed + static_cast<int>(request.drafts.size());
    // The others must keep a block each to grow by, or a guess could drive one of them out.
    const KvNeed room = available();
    const int spare = std::min(room.blocks, table.windows().wants_more() ? room.windows : room.blocks) -
                      static_cast<int>(running_.size());
    const int missing = blocks_for_tokens(tokens) - table.num_places();
    if (missing > 0 && (missing > spare || !table.reserve(pool_, tokens))) {
        tokens = table.num_places() * kBlockTokens;
    }
    table.grow(pool_, tokens);
    request.drafts.resize(static_cast<size_t>(tokens - fed));
    return tokens - fed;
}

// Most chunks are a token that fills no block: of those nothing is to be done, unless somebody is special.
void Scheduler::keep_computed(const StepPlan& plan, bool failed) {
    pool_.tiers().each([&](HostTier& tier) {
        tier.settle(plan.moves);
        if (failed) tier.clear();  // what a request's useless logits came from may lie there
    });
    const bool special = failed || plan.needs_host;
    for (const ScheduledChunk& chunk : plan.chunks) {
        if (special || chunk.start / kBlockTokens != chunk.end() / kBlockTokens) keep_chunk(chunk);
    }
}

void Scheduler::keep_chunk(const ScheduledChunk& chunk) {
    Request& request = *chunk.request;
    if (request.finish_reason == FinishReason::kError) {
        request.block_table.forget(pool_);  // what made its logits useless may lie in its blocks
    } else {
        // Right drafts are computed as well. No step is planned ahead of one with drafts.
        const int computed = chunk.num_drafts > 0 ? request.num_computed : chunk.end();
        const int in_table = request.searches() ? request.prompt_tokens : computed;
        request.block_table.keep(pool_, request.tokens, std::min(in_table, computed));
    }
    if (request.searches() && chunk.beam <= 0) follow_beams(request);
}

// The blocks go where the search went.
void Scheduler::follow_beams(Request& request) {
    if (request.state != RequestState::kDecoding) return;
    auto& [search, tables] = *request.beams;
    if (tables.branched()) {
        tables.reorder(pool_, search.parents(), request.num_computed);
    } else {
        tables.branch(pool_, request.block_table.blocks(), search.num_live());
    }
}

void Scheduler::drop_finished() {
    const auto has_finished = [](const ScheduledChunk& chunk) {
        return chunk.request->state == RequestState::kFinished;
    };
    auto& chunks = plan_->chunks;
    const auto decodes = std::count_if(chunks.begin(), chunks.begin() + plan_->num_decodes, has_finished);
    plan_->num_decodes -= static_cast<int>(decodes);
    std::erase_if(chunks, has_finished);
}

void Scheduler::retire_finished() {
    const auto finished = std::erase_if(running_, [this](Request* request) {
        if (request->state != RequestState::kFinished) return false;
        stop_running(*request);
        return true;
    });
    if (finished > 0 && under_way_ != nullptr) drop_finished();
}

void Scheduler::abandon() noexcept {
    waiting_.clear();
    for (Request* request : running_) {
        try {
            request->give_back(pool_);
        } catch (const std::logic_error&) {
            // The accounting is what broke; there is nothing left to protect.
        }
    }
    running_.clear();
    fed_.clear();
    extra_beams_ = 0;
    host_bound_ = 0;
}

void Scheduler::remove(Request& request) {
    const auto running = std::find(running_.begin(), running_.end(), &request);
    if (running == running_.end()) {
        waiting_.remove(request);
    } else {
        running_.erase(running);
        stop_running(request);
    }
}

}  // namespace castiron
