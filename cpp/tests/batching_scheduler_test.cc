#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "batching/scheduler.h"

using namespace castiron;

namespace {

std::unique_ptr<Request> make_request(int prompt_tokens, int max_new_tokens, bool context_logits = false) {
    static RequestId next = 1;
    SamplingParams params;
    params.max_tokens = max_new_tokens;
    params.context_logits = context_logits;
    const std::vector<int32_t> prompt(static_cast<size_t>(prompt_tokens), 3);
    return std::make_unique<Request>(next++, prompt, params, 0, max_new_tokens, 2);
}

// Does to the requests what a step would.
void run(const StepPlan& plan) {
    for (const ScheduledChunk& chunk : plan.chunks) {
        const bool completes = chunk.completes();
        chunk.request->num_computed += chunk.num_tokens;
        if (!completes) continue;
        SampledToken sampled;
        sampled.token = 1;
        chunk.request->append(sampled);
    }
}

}  // namespace

TEST_CASE("decodes come first, then prefill chunks fill the token budget") {
    BlockPool pool(100);
    Scheduler scheduler({8, 10, 8, 100}, pool);
    const auto a = make_request(3, 5);
    scheduler.enqueue(*a);
    run(scheduler.schedule());
    CHECK(a->state == RequestState::kDecoding);
    const auto b = make_request(25, 5);
    const auto c = make_request(4, 5);
    scheduler.enqueue(*b);
    scheduler.enqueue(*c);
    const StepPlan& plan = scheduler.schedule();
    REQUIRE(plan.chunks.size() == 2);
    CHECK(plan.chunks[0].request == a.get());
    CHECK(plan.chunks[0].num_tokens == 1);
    CHECK(plan.chunks[0].num_logits == 1);
    CHECK(plan.chunks[1].request == b.get());
    CHECK(plan.chunks[1].num_tokens == 9);
    CHECK(plan.chunks[1].num_logits == 0);
    run(plan);
    run(scheduler.schedule());
    const StepPlan& last = scheduler.schedule();  // 1 + (25 - 18) + the first 2 of c
    REQUIRE(last.chunks.size() == 3);
    CHECK(last.chunks[1].num_tokens == 7);
    CHECK(last.chunks[1].completes());
    CHECK(last.chunks[2].request == c.get());
    CHECK(last.chunks[2].num_tokens == 2);
}

TEST_CASE("a request waits until the blocks of its whole life are free, and nobody overtakes it") {
    BlockPool pool(4);
    Scheduler scheduler({8, 64, 8, 200}, pool);
    const auto a = make_request(40, 30);    // 69 cached tokens: 3 blocks
    const auto b = make_request(10, 30);    // 39: 2 blocks
    const auto small = make_request(3, 2);  // 1 block: would fit at once
    for (Request* request : {a.get(), b.get(), small.get()}) scheduler.enqueue(*request);
    const StepPlan& plan = scheduler.schedule();
    CHECK(plan.chunks.size() == 1);
    CHECK(scheduler.blocked() == Blocked::kKvBlocks);
    CHECK(scheduler.waiting().size() == 2);
    run(plan);
    while (a->state != RequestState::kFinished) run(scheduler.schedule());
    scheduler.retire_finished();
    CHECK(pool.used() == 0);
    CHECK(scheduler.schedule().chunks.size() == 2);
}

TEST_CASE("a request that could never fit is refused with the numbers") {
    BlockPool pool(2);
    const Scheduler scheduler({8, 64, 8, 2000}, pool);
    scheduler.check_can_ever_run(60, 5);  // 64 cached tokens: the last one generated is not cached
    CHECK_THROWS_WITH_AS(
        scheduler.check_can_ever_run(60, 6),
        "the request needs 3 KV blocks (60 prompt tokens + 6 to generate), the cache has 2; shorten "
        "the request or raise kv_cache_blocks",
        std::invalid_argument);
}

TEST_CASE("context logits are bounded by the row budget and do not take the rows of decodes") {
    BlockPool pool(100);
    Scheduler scheduler({4, 64, 4, 200}, pool);
    const auto a = make_request(2, 9);
    scheduler.enqueue(*a);
    run(scheduler.schedule());
    const auto context = make_request(10, 1, true);
    const auto c = make_request(6, 5);
    scheduler.enqueue(*context);
    scheduler.enqueue(*c);
    const StepPlan& plan = scheduler.schedule();
    REQUIRE(plan.chunks.size() == 3);
    CHECK(plan.chunks[1].num_tokens == 3);
    CHECK(plan.chunks[1].num_logits == 3);
    CHECK(plan.chunks[2].num_tokens == 5);  // its last token needs a row of logits, and none is left
    CHECK(plan.chunks[2].num_logits == 0);
    CHECK(plan.num_logit_rows == 4);
}

TEST_CASE("random loads: budgets hold, every decode moves, the oldest prefill moves, all requests end") {
    for (uint32_t seed = 0; seed < 300; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        const auto pick = [&](int low, int high) {
            return low + static_cast<int>(random() % static_cast<uint32_t>(high - low + 1));
        };
        BlockPool pool(pick(2, 30));
        const SchedulerLimits limits{pick(1, 9), pick(1, 50), pick(1, 9), 64 * pick(1, 4)};
        Scheduler scheduler(limits, pool);
        std::vector<std::unique_ptr<Request>> requests;
        size_t finished = 0;
        int arrivals = pick(1, 30);
        for (int step = 0; arrivals > 0 || finished < requests.size(); ++step) {
            REQUIRE(step < 20000);
            while (arrivals > 0 && (random() % 3 == 0 || finished == requests.size())) {
                --arrivals;
                const int longest = std::min(limits.max_seq_len, 32 * pool.total());
                const int prompt = pick(1, longest - 1);
                auto request = make_request(prompt, pick(1, longest - prompt), random() % 4 == 0);
                scheduler.check_can_ever_run(request->prompt_tokens, request->max_new_tokens);
                scheduler.enqueue(*request);
                requests.push_back(std::move(request));
            }
            if (random() % 20 == 0) {
                Request& victim = *requests[random() % requests.size()];
                if (victim.state != RequestState::kFinished) {
                    victim.finish(FinishReason::kCancelled);
                    scheduler.remove(victim);
                    ++finished;
                }
            }
            const StepPlan& plan = scheduler.schedule();
            int tokens = 0;
            int rows = 0;
            for (const ScheduledChunk& chunk : plan.chunks) {
                CHECK(chunk.num_tokens > 0);
                CHECK(chunk.num_tokens <= chunk.request->num_pending());
                CHECK(chunk.num_logits <= chunk.num_tokens);
                if (chunk.completes()) CHECK(chunk.num_logits >= 1);
                CHECK(static_cast<int>(chunk.request->block_table.blocks().size()) >=
                      blocks_for_tokens(chunk.request->num_computed + chunk.num_tokens));
                tokens += chunk.num_tokens;
                rows += chunk.num_logits;
            }
            CHECK(tokens == plan.num_tokens);
            CHECK(rows == plan.num_logit_rows);
            CHECK(tokens <= limits.max_num_tokens);
            CHECK(rows <= limits.max_logit_rows);
            CHECK(static_cast<int>(scheduler.running().size()) <= limits.max_batch_size);
            CHECK((plan.chunks.empty() == (finished == requests.size())));
            bool oldest_prefill = true;
            for (Request* request : scheduler.running()) {
                const bool moves =
                    std::any_of(plan.chunks.begin(), plan.chunks.end(),
                                [&](const ScheduledChunk& chunk) { return chunk.request == request; });
                if (request->state == RequestState::kDecoding) CHECK(moves);
                if (request->state == RequestState::kPrefilling && std::exchange(oldest_prefill, false))
                    CHECK(moves);
            }
            run(plan);
            for (const ScheduledChunk& chunk : plan.chunks) {
                finished += chunk.request->state == RequestState::kFinished ? 1 : 0;
            }
            scheduler.retire_finished();
            pool.check_integrity();
        }
        CHECK(pool.used() == 0);
        CHECK(pool.promised() == 0);
    }
}
