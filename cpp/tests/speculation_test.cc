// What guesses tokens, and how many of them: the pieces on their own.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "batching/request.h"
#include "sampling/philox.h"
#include "speculation/lookup_drafter.h"
#include "speculation/match_index.h"
#include "speculation/step_value.h"

using namespace castiron;

namespace {

std::unique_ptr<Request> make_request(const std::vector<int32_t>& prompt, const Drafter& drafter) {
    auto request = std::make_unique<Request>(1, prompt, SamplingParams{}, 0, 400, 1000);
    request->drafts.reserve(static_cast<size_t>(drafter.max_tokens()));
    request->draft_with(drafter.begin(*request));
    return request;
}

std::vector<int32_t> guess(Drafter& drafter, Request& request, int room = 4, double row_cost = 0.01) {
    StepCost cost;
    for (const int rows : {1, 11}) cost.observe(rows, 1 + row_cost * (rows - 1));
    StepValue value(cost, 1, room);
    request.drafts.clear();
    const DraftWish wish{&request, room};
    drafter.draft({&wish, 1}, value);
    return request.drafts;
}

// Lets the request say a token.
void say(Request& request, int32_t token) {
    SampledToken sampled;
    sampled.token = token;
    request.append(sampled);
}

}  // namespace

TEST_CASE("the match index finds what a search of the whole text finds") {
    std::mt19937 random(7);
    for (int vocabulary : {2, 5, 40}) {
        std::vector<int32_t> text;
        MatchIndex index(300);
        for (int i = 0; i < 300; ++i) {
            text.push_back(static_cast<int32_t>(random()) % vocabulary);
            index.extend(text);
            const auto size = static_cast<int>(text.size());
            int longest = 0;  // of all earlier places
            for (int next = 1; next < size; ++next) {
                int length = 0;
                while (length < std::min(next, 16) && text[static_cast<size_t>(next - 1 - length)] ==
                                                          text[static_cast<size_t>(size - 1 - length)])
                    ++length;
                longest = std::max(longest, length);
            }
            MatchIndex::Match matches[3];
            const size_t count = index.find(text, 16, 0, matches);
            if (vocabulary == 40) CHECK((count > 0) == (longest >= MatchIndex::kShortest));
            for (size_t m = 0; m < count; ++m) {
                // A small vocabulary has more places than one look compares.
                if (vocabulary == 40) CHECK(matches[m].length == longest);
                CHECK(matches[m].length == matches[0].length);
                CHECK((m == 0 || matches[m].next < matches[m - 1].next));
                CHECK(std::equal(text.end() - matches[m].length, text.end(),
                                 text.begin() + matches[m].next - matches[m].length));
            }
        }
    }
}

TEST_CASE("a text that repeats is guessed as it went on before, a loop round and round") {
    for (const LookupMethod method : {LookupMethod::kNgram, LookupMethod::kSuffix}) {
        LookupDrafter drafter(method, 4);
        const auto copied = make_request({1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}, drafter);
        CHECK(guess(drafter, *copied) == std::vector<int32_t>{4, 5, 6, 7});
        const auto loop = make_request({9, 5, 6, 5, 6, 5, 6}, drafter);
        CHECK(guess(drafter, *loop) == std::vector<int32_t>{5, 6, 5, 6});
        const auto fresh = make_request({1, 2, 3, 4, 5}, drafter);
        CHECK(guess(drafter, *fresh).empty());
    }
}

TEST_CASE("n-grams look at the latest place, suffixes at the longest and then at the majority") {
    LookupDrafter ngram(LookupMethod::kNgram, 1);
    LookupDrafter suffix(LookupMethod::kSuffix, 1);
    // Six tokens in common with the first place, four with the second.
    const std::vector<int32_t> nested{1, 2, 3, 4, 5, 6, 70, 3, 4, 5, 6, 80, 1, 2, 3, 4, 5, 6};
    CHECK(guess(ngram, *make_request(nested, ngram), 1) == std::vector<int32_t>{80});
    CHECK(guess(suffix, *make_request(nested, suffix), 1) == std::vector<int32_t>{70});
    const std::vector<int32_t> voted{1, 2, 70, 1, 2, 70, 1, 2, 80, 60, 1, 2};
    CHECK(guess(ngram, *make_request(voted, ngram), 1) == std::vector<int32_t>{80});
    CHECK(guess(suffix, *make_request(voted, suffix), 1) == std::vector<int32_t>{70});
}

TEST_CASE("a request whose guesses are wrong is left alone, until looking things up helps again") {
    LookupDrafter drafter(LookupMethod::kSuffix, 8);
    std::vector<int32_t> text;
    for (int i = 0; i < 60; ++i) text.insert(text.end(), {1, 2, 100 + i});  // after 1, 2 comes a new token
    const auto request = make_request(text, drafter);
    const auto guesses_of_pair = [&](int32_t next) {
        say(*request, 1);
        static_cast<void>(guess(drafter, *request, 8, 0.2));
        say(*request, 2);
        const size_t count = guess(drafter, *request, 8, 0.2).size();
        say(*request, next);
        return count;
    };
    for (int i = 0; i < 20; ++i) static_cast<void>(guesses_of_pair(200 + i));
    CHECK(guesses_of_pair(300) == 0);
    for (int i = 0; i < 20; ++i) static_cast<void>(guesses_of_pair(500));
    CHECK(guesses_of_pair(500) > 0);
}

TEST_CASE("a step's cost is the line through what steps took, and a disturbed step does not bend it") {
    StepCost cost;
    std::mt19937 random(3);
    for (int i = 0; i < 300; ++i) {
        const int rows = 1 + static_cast<int>(random() % 8);
        const double noise = 0.9 + 0.2 * static_cast<double>(random() % 1000) / 1000;
        cost.observe(rows, (0.008 + 0.002 * rows) * noise * (i % 50 == 49 ? 40 : 1));
    }
    CHECK(cost.seconds(1) == doctest::Approx(0.010).epsilon(0.25));
    CHECK(cost.per_row() == doctest::Approx(0.002).epsilon(0.3));
}

TEST_CASE("a guess is worth its row while it does not lower the tokens per second") {
    StepCost cost;
    for (int i = 0; i < 400; ++i) cost.observe(1 + i % 2 * 8, i % 2 == 0 ? 1.0 : 3.0);  // 0.25 a row
    StepValue value(cost, 1, 3);
    CHECK(value.worth(0.3));
    CHECK_FALSE(value.worth(0.2));
    CHECK_FALSE(value.worth(0.3, 0.5));
    value.add(1);  // two tokens in 1.25: the next has to bring 0.4
    CHECK_FALSE(value.worth(0.35));
    CHECK(value.worth(0.45));
    value.add(1);
    value.add(1);
    CHECK_FALSE(value.worth(1));  // no row is left
}
