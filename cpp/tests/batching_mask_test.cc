#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <stdexcept>
#include <thread>
#include <vector>

#include "batching/mask_exchange.h"
#include "tests/engine_support.h"

using namespace castiron;
using namespace castiron::testing;
using namespace std::chrono_literals;

namespace {

std::vector<uint32_t> only(std::initializer_list<int> tokens) {
    std::vector<uint32_t> mask(2, 0);
    for (const int token : tokens) mask[static_cast<size_t>(token) / 32] |= 1U << (token % 32);
    return mask;
}

}  // namespace

TEST_CASE("a wish tells every token once, and a mask is taken for its own token alone") {
    MaskExchange exchange;
    exchange.add(7, only({1}), 10);
    CHECK(exchange.poll(0s).empty());
    CHECK(exchange.wait(7, 0, 0, 0s).row(0)[0] == 2U);
    exchange.ask(7, std::vector<int32_t>{1}, 1);
    exchange.ask(7, std::vector<int32_t>{5}, 2);
    const auto wishes = exchange.poll(0s);
    REQUIRE(wishes.size() == 1);
    CHECK(wishes[0].request_id == 7);
    CHECK(wishes[0].num_output == 2);
    CHECK(wishes[0].tokens == std::vector<int32_t>{1, 5});
    exchange.give(7, 1, 0, {only({2}), 1});  // late: two tokens are there
    CHECK_THROWS_WITH_AS(static_cast<void>(exchange.wait(7, 2, 0, 1ms)), doctest::Contains("took longer"),
                         std::runtime_error);
    exchange.give(7, 2, 0, {only({3}), 1});
    CHECK(exchange.wait(7, 2, 0, 0s).row(0)[0] == 8U);
    exchange.refuse(7, 2, "no way on");
    CHECK_THROWS_WITH_AS(static_cast<void>(exchange.wait(7, 2, 0, 0s)), "no way on", std::runtime_error);
    exchange.drop(7);
    exchange.give(7, 2, 0, {only({3}), 1});
    exchange.ask(7, std::vector<int32_t>{1}, 3);
    CHECK(exchange.poll(0s).empty());
}

TEST_CASE("masks behind drafts are waited for, and forgotten with the next token") {
    MaskExchange exchange;
    exchange.add(7, only({1}), 10);
    exchange.ask(7, std::vector<int32_t>{1}, 1);
    exchange.ask_along(7, std::vector<int32_t>{4, 5});
    auto wishes = exchange.poll(0s);
    REQUIRE(wishes.size() == 1);
    CHECK(wishes[0].tokens == std::vector<int32_t>{1});
    CHECK(wishes[0].drafts == std::vector<int32_t>{4, 5});
    exchange.give(7, 1, 0, {only({4}), 1});  // as of a wish before the drafts
    CHECK(exchange.wait(7, 1, 0, 0s).count == 1);
    CHECK_THROWS_WITH_AS(static_cast<void>(exchange.wait(7, 1, 2, 1ms)), doctest::Contains("took longer"),
                         std::runtime_error);
    std::vector<uint32_t> both = only({4});
    const auto second = only({9});
    both.insert(both.end(), second.begin(), second.end());
    exchange.give(7, 1, 2, {both, 2});  // it takes the first draft and not the second
    const MaskRows masks = exchange.wait(7, 1, 2, 0s);
    REQUIRE(masks.count == 2);
    CHECK(masks.row(0)[0] == 1U << 4);
    CHECK(masks.row(1)[0] == 1U << 9);
    exchange.ask_along(7, std::vector<int32_t>{6});
    exchange.ask(7, std::vector<int32_t>{4, 9}, 3);
    wishes = exchange.poll(0s);
    REQUIRE(wishes.size() == 1);
    CHECK(wishes[0].tokens == std::vector<int32_t>{4, 9});
    CHECK(wishes[0].drafts.empty());
}

TEST_CASE("constrained requests follow their masks beside free ones") {
    // Request k may only say (3k, 3k + 1) in turns; masks come from another thread.
    const Limits limits{8, 64, 8, 128};
    Engine engine(std::make_unique<FakeDevice>(limits, kVocab), limits, kVocab, {});
    std::atomic<bool> stop{false};
    std::thread masks([&] {
        std::map<RequestId, int> seen;
        while (!stop) {
            for (const MaskWish& wish : engine.masks().poll(10ms)) {
                seen[wish.request_id] += static_cast<int>(wish.tokens.size());
                CHECK(seen[wish.request_id] == wish.num_output);
                const int base = wish.tokens.back() / 3 * 3;
                const auto mask = only({wish.num_output % 2 == 0 ? base : base + 1});
                engine.masks().give(wish.request_id, wish.num_output, 0, {mask, 1});
            }
        }
    });
    const std::vector<int32_t> prompt{1, 2, 3};
    std::vector<RequestId> ids;
    SamplingParams params;
    params.temperature = 0;
    params.max_tokens = 20;
    for (int k = 0; k < 12; ++k) {
        SamplingParams own = params;
        if (k % 3 != 2) own.first_mask = only({3 * k});
        ids.push_back(engine.submit(prompt, own));
    }
    Outcomes ended;
    finish_all(engine, ended, ids.size(), 20s);
    stop = true;
    masks.join();
    for (int k = 0; k < 12; ++k) {
        const Outcome& one = ended.at(ids[static_cast<size_t>(k)]);
        CHECK(one.reason == FinishReason::kLength);
        REQUIRE(one.tokens.size() == 20);
        if (k % 3 == 2) continue;
        for (int i = 0; i < 20; ++i) CHECK(one.tokens[static_cast<size_t>(i)] == 3 * k + i % 2);
    }
}

TEST_CASE("a mask that is refused ends its own request, and shutdown does not wait for one") {
    const Limits limits{8, 64, 8, 128};
    Engine engine(std::make_unique<FakeDevice>(limits, kVocab, true), limits, kVocab, {});
    SamplingParams params;
    params.temperature = 0;
    params.max_tokens = 5;
    SamplingParams constrained = params;
    constrained.first_mask = only({4});
    const std::vector<int32_t> prompt{1, 2, 3};
    const RequestId refused = engine.submit(prompt, constrained);
    const RequestId free = engine.submit(prompt, params);
    std::vector<MaskWish> wishes;
    while (wishes.empty()) wishes = engine.masks().poll(100ms);
    engine.masks().refuse(wishes[0].request_id, wishes[0].num_output, "the grammar ends here");
    Outcomes ended;
    finish_all(engine, ended, 2, 20s);
    CHECK(ended.at(refused).reason == FinishReason::kError);
    CHECK(ended.at(refused).error == "the grammar ends here");
    CHECK(ended.at(refused).tokens == std::vector<int32_t>{4});
    CHECK(ended.at(free).reason == FinishReason::kLength);
    static_cast<void>(engine.submit(prompt, constrained));
    while (engine.masks().poll(100ms).empty()) {
    }
    const auto began = std::chrono::steady_clock::now();
    engine.shutdown();
    CHECK(std::chrono::steady_clock::now() - began < 2s);
}
