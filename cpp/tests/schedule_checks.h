// What must hold of a scheduler at every step, and of what its requests said: each against what it says
// alone, and accounts made anew from what everybody holds. All throw std::runtime_error that says what is
// wrong.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "batching/scheduler.h"
#include "tests/alone.h"
#include "tests/fake_device.h"

namespace castiron::testing {

inline void require(bool holds, const std::string& what) {
    if (!holds) throw std::runtime_error(what);
}

inline void check_context_logits(const Request& request, const std::string& name, int vocab_size,
                                 int window) {
    const auto vocab = static_cast<size_t>(vocab_size);
    const int32_t shift = shift_of(request.adapter.get());
    std::vector<float> logits(vocab);
    require(request.context_rows_left == 0, name + " lacks context logits");
    for (size_t row = 0; row < static_cast<size_t>(request.prompt_tokens); ++row) {
        hashed_logits(shifted(in_window(request.prompt().first(row + 1), window), shift), logits);
        require(std::equal(logits.begin(), logits.end(), request.context_logits.get() + row * vocab),
                name + " has wrong context logits");
    }
}

inline void check_beams(const Request& request, const std::string& name, int vocab_size, int window) {
    if (request.finish_reason == FinishReason::kCancelled || request.finish_reason == FinishReason::kError) {
        return;
    }
    const auto expected = alone_beams(vocab_size, request.prompt(), request.params, request.seed,
                                      request.max_new_tokens, shift_of(request.adapter.get()), window);
    const auto found = request.beams->search.results();
    const auto same = [](const BeamOutput& a, const BeamOutput& b) {
        return a.token_ids == b.token_ids && a.logprobs == b.logprobs && a.stop_token_id == b.stop_token_id;
    };
    require(std::equal(found.begin(), found.end(), expected.begin(), expected.end(), same),
            name + " does not find what it finds alone");
    if (request.params.context_logits) check_context_logits(request, name, vocab_size, window);
}

// What it said, against what it says alone; of one that did not come to its end, the beginning.
inline void check_output(const Request& request, const std::string& name, int vocab_size, int window) {
    const int32_t shift = shift_of(request.adapter.get());
    if (request.beams != nullptr) return check_beams(request, name, vocab_size, window);
    const Alone expected = alone(vocab_size, request.prompt(), request.params, request.seed,
                                 request.max_new_tokens, shift, window);
    const auto output = request.output();
    const bool early =
        request.finish_reason == FinishReason::kCancelled || request.finish_reason == FinishReason::kError;
    require(output.size() <= expected.tokens.size() &&
                std::equal(output.begin(), output.end(), expected.tokens.begin()),
            name + " does not say what it says alone");
    if (early) return;
    require(output.size() == expected.tokens.size(), name + " ended too early");
    require(request.finish_reason == expected.reason && request.stop_token == expected.stop_token,
            name + " ended for another reason than alone");
    if (request.params.context_logits) check_context_logits(request, name, vocab_size, window);
}

// A request holds the blocks that its tokens of the step see, and none before them; one that decodes looks at
// the beginning of each block.
inline void check_window(const ScheduledChunk& chunk, const SchedulerLimits& limits) {
    const BlockTable& table = chunk.request->block_table;
    const bool keeps_all =
        limits.kv_window == 0 || limits.window_of_some || chunk.request->beams != nullptr || !table.slides();
    if (keeps_all) return require(table.num_released() == 0, "blocks were given back without a window");
    const auto behind = [&](int position) {
        return std::max(position - std::max(limits.kv_window, kBlockTokens + 1) + 1, 0) / kBlockTokens;
    };
    const bool decodes = chunk.request->state == RequestState::kDecoding;
    const bool inside = decodes && chunk.start % kBlockTokens != 0;
    require(
        inside ? table.num_released() <= behind(chunk.start) : table.num_released() == behind(chunk.start),
        "blocks behind the window: " + std::to_string(table.num_released()) + " given back, expected " +
            std::to_string(behind(chunk.start)));
    const int most = limits.kv_window + limits.max_num_tokens + 4 * kBlockTokens;
    require(table.num_blocks() * kBlockTokens <= most, "a request holds more than its window and a chunk");
}

// Of a model of which some layers have a window: a request reads the window blocks that its tokens of the
// step see, and before them no more than those of a block that is being filled.
inline void check_window_blocks(const ScheduledChunk& chunk, const SchedulerLimits& limits,
                                const WindowPool& pool) {
    const Request& request = *chunk.request;
    const WindowTable& table = request.block_table.windows();
    const auto blocks = chunk.blocks();
    const auto windows = chunk.windows();
    require(windows.size() >= blocks.size(), "a table of window blocks is too short");
    if (request.beams != nullptr) {
        require(table.first() == 0, "a beam search gave window blocks back");
    } else {
        const auto first_seen = [&](int position) {
            return std::max(position - std::max(limits.kv_window, 2) + 1, 0) / kBlockTokens;
        };
        const bool inside = request.state == RequestState::kDecoding && chunk.start % kBlockTokens != 0;
        require(table.first() <= first_seen(chunk.start), "a window block that is seen was given back");
        require(inside || table.first() == first_seen(chunk.start),
                "window blocks that nobody sees are kept");
        const int most = (limits.kv_window + chunk.num_tokens) / kBlockTokens + 4;
        require(static_cast<int>(blocks.size()) - table.first() <= most,
                "more window blocks than a window's");
    }
    const auto first = chunk.beam >= 0 ? 0 : static_cast<size_t>(table.first());
    for (size_t place = 0; place < blocks.size(); ++place) {
        require(windows[place] == pool.of(blocks[std::max(place, first)]),
                "the window block of another block");
    }
}

inline void check_plan(const StepPlan& plan, const SchedulerLimits& limits, const Scheduler& scheduler,
                       const BlockPool& pool) {
    int tokens = 0;
    int rows = 0;
    int drafts = 0;
    std::set<std::pair<const Request*, int>> moving;
    for (const ScheduledChunk& chunk : plan.chunks) {
        const Request& request = *chunk.request;
        moving.insert({&request, chunk.beam});
        tokens += chunk.num_tokens;
        rows += chunk.num_logits;
        require(request.state != RequestState::kFinished, "a request that has ended is in the step");
        require(chunk.num_pending() > 0 && chunk.num_pending() <= request.num_pending() &&
                    chunk.start == request.num_computed && chunk.request_pending == request.num_pending(),
                "a chunk of a wrong size");
        require(static_cast<size_t>(chunk.num_drafts) == request.drafts.size(), "drafts of a chunk");
        drafts += chunk.num_drafts;
        if (chunk.num_drafts > 0) {
            const int most = request.params.num_speculative_tokens;
            require(request.state == RequestState::kDecoding && chunk.num_logits == chunk.num_tokens,
                    "drafts that nobody can check");
            require(chunk.num_drafts < request.max_new_tokens - request.num_output(),
                    "drafts behind the last token");
            require(request.draft_state != nullptr && (most < 0 || chunk.num_drafts <= most),
                    "drafts that nobody wanted");
        }
        require(!chunk.completes() || chunk.num_logits >= 1, "a request completes without logits");
        check_window(chunk, limits);
        if (pool.windows() != nullptr) check_window_blocks(chunk, limits, *pool.windows());
        for (int p = chunk.start / kBlockTokens; p <= (chunk.start + chunk.num_tokens - 1) / kBlockTokens;
             ++p) {
            const int32_t block = chunk.blocks()[static_cast<size_t>(p)];
            require(pool.references(block) == 1 && !pool.tree().contains(block),
                    "a step writes to a block that is not the request's alone");
            require(pool.windows() == nullptr || pool.windows()->readers(block) == 1,
                    "a step writes to a window block that is not the request's alone");
        }
    }
    require(drafts == plan.num_drafts, "drafts of the step");
    require(tokens == plan.num_tokens && tokens <= limits.max_num_tokens, "tokens of the step");
    require(rows == plan.num_logit_rows && rows <= limits.max_logit_rows, "rows of the step");
    require(moving.size() == plan.chunks.size(), "a request is in the step twice");
    int sequences = 0;
    std::set<const Adapter*> adapters;
    for (const Request* request : scheduler.running()) {
        sequences += request->width();
        if (request->adapter != nullptr) adapters.insert(request->adapter.get());
    }
    require(sequences <= limits.max_batch_size, "sequences that run");
    require(static_cast<int>(adapters.size()) <= limits.max_loras, "adapters that run");
}

// Every decode and the first prefill move. (Not in a plan made ahead: a request may be at its end by
// then, or wait for what the step under way computes.)
inline void check_progress(const StepPlan& plan, const Scheduler& scheduler,
                           const std::vector<Request*>& before) {
    std::set<const Request*> moving;
    for (const ScheduledChunk& chunk : plan.chunks) moving.insert(chunk.request);
    bool first_prefill = true;
    const Request* previous = nullptr;
    for (const Request* request : scheduler.running()) {
        require(previous == nullptr || previous->before(*request), "the running requests are out of order");
        previous = request;
        if (request->state == RequestState::kDecoding) {
            require(moving.contains(request), "a decoding request stands still");
        } else if (std::find(before.begin(), before.end(), request) != before.end() &&
                   std::exchange(first_prefill, false)) {
            require(moving.contains(request), "the first prefill stands still");
        }
    }
}

// A running request before a step was planned.
struct Before {
    int computed = 0;
    int preemptions = 0;
};

// Whoever had to go was of the lowest priority and had the least computed, and the first stayed, but
// where nobody else could go. Beam searches always stay.
inline void check_preemptions(CapacityPolicy policy, const std::vector<Request*>& before,
                              const std::map<const Request*, Before>& were,
                              const std::set<int32_t>& waiting_priorities) {
    const auto stays = [&](const Request* request) {
        return request->beams == nullptr && request->preemptions == were.at(request).preemptions;
    };
    for (size_t i = 0; i < before.size(); ++i) {
        const Request& gone = *before[i];
        if (gone.preemptions == were.at(&gone).preemptions) continue;
        require(gone.beams == nullptr, "a beam search was set back");
        require(policy == CapacityPolicy::kMaxUtilization,
                "a request was set back although it had a guarantee");
        const bool outranked = !waiting_priorities.empty() && *waiting_priorities.begin() < gone.priority();
        require(i > 0 || outranked || std::none_of(before.begin(), before.end(), stays),
                "the first running request was set back");
        for (size_t j = 1; j < before.size(); ++j) {
            const Request& other = *before[j];
            if (!stays(&other)) continue;
            require(
                other.priority() < gone.priority() || (other.priority() == gone.priority() &&
                                                       were.at(&other).computed >= were.at(&gone).computed),
                "another request had less to lose");
        }
    }
}

inline bool runs(const Request& request) {
    return request.state == RequestState::kPrefilling || request.state == RequestState::kDecoding;
}

// Adds the blocks that the beams hold behind the prompt's. Returns how many are promised to them: all
// that they may need and do not hold.
inline int count_beams(const Request& request, std::map<int32_t, int>& held) {
    const auto& [search, tables] = *request.beams;
    std::set<int32_t> own;
    for (int beam = 0; tables.branched() && beam < search.num_live(); ++beam) {
        const auto shared = static_cast<size_t>(request.prompt_tokens / kBlockTokens);
        for (const int32_t block : tables.blocks(beam).subspan(shared)) {
            ++held[block];
            own.insert(block);
        }
    }
    return tables.max_blocks() - static_cast<int>(own.size());
}

// Readers and promises of window blocks, counted anew from what everybody reads. held: by block.
inline void check_windows(std::span<const Request* const> requests, const BlockPool& pool,
                          const std::map<int32_t, int>& held) {
    const WindowPool& windows = *pool.windows();
    std::map<int32_t, int> readers;
    int promised = 0;
    for (const Request* request : requests) {
        const WindowTable& table = request->block_table.windows();
        const auto blocks = request->block_table.blocks();
        require(table.blocks().size() == blocks.size(), "window blocks of other places than blocks");
        for (size_t place = static_cast<size_t>(table.first()); place < blocks.size(); ++place) {
            ++readers[blocks[place]];
            require(windows.of(blocks[place]) == table.blocks()[place], "a window block that moved away");
        }
        promised += table.promised();
        if (request->beams == nullptr || !runs(*request)) continue;
        std::map<int32_t, int> of_beams;
        static_cast<void>(count_beams(*request, of_beams));
        for (const auto& [block, count] : of_beams) readers[block] += count;
        promised += request->beams->tables.max_blocks();
    }
    for (const auto& [block, count] : held) {
        require(windows.readers(block) == (readers.contains(block) ? readers.at(block) : 0),
                "readers of window blocks");
    }
    require(windows.used() == static_cast<int>(readers.size()), "used window blocks");
    require(windows.promised() == promised, "promised window blocks");
}

inline void check_accounts(std::span<const Request* const> requests, const Scheduler& scheduler,
                           const BlockPool& pool) {
    pool.check_integrity();
    std::map<int32_t, int> held;
    std::map<int32_t, int> payers;  // of the holders: those with a window
    int promised = 0;
    size_t running = 0;
    for (const Request* request : requests) {
        const BlockTable& table = request->block_table;
        running += runs(*request);
        if (request->state == RequestState::kFinished || request->state == RequestState::kWaiting) {
            require(table.num_blocks() == 0, "a request that does not run holds blocks");
        }
        for (const int32_t block : table.held()) {
            ++held[block];
            payers[block] += table.slides() ? 1 : 0;
        }
        promised += table.num_blocks() - static_cast<int>(table.held().size());
        if (request->beams != nullptr && runs(*request)) promised += count_beams(*request, held);
    }
    require(running == scheduler.running().size(), "the running requests are not those that run");
    require(pool.used() == static_cast<int>(held.size()), "used blocks");
    require(pool.promised() == promised, "promised blocks");
    int spoken_for = promised;  // a block for each payer, and one for all others together
    for (const auto& [block, count] : held) spoken_for += payers[block] + (count > payers[block] ? 1 : 0);
    require(pool.available() == pool.total() - spoken_for, "available blocks");
    for (const auto& [block, count] : held) require(pool.references(block) == count, "references");
    if (pool.windows() != nullptr) check_windows(requests, pool, held);
}

}  // namespace castiron::testing
