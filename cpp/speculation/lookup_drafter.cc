#include "speculation/lookup_drafter.h"

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "batching/request.h"
#include "speculation/hit_rates.h"
#include "speculation/match_index.h"

namespace castiron {
namespace {

constexpr size_t kLengthClasses = 6;
constexpr size_t kMostVoters = 8;  // matches of the same length that are asked
constexpr int kLongestNgram = 4;
constexpr int kLongestSuffix = 64;

// 2, 3, 4, 5 to 8, 9 to 16 tokens, more.
size_t length_class(int length) {
    const auto width = static_cast<size_t>(std::bit_width(static_cast<unsigned>(length - 1)));
    return length <= 3 ? static_cast<size_t>(length - 2) : std::min(width, kLengthClasses - 1);
}

// By class, where all voters agree and where they do not.
constexpr std::array<float, 2 * kLengthClasses> kBeliefs{0.2F, 0.35F, 0.5F, 0.7F, 0.85F, 0.9F,
                                                         0.1F, 0.2F,  0.3F, 0.4F, 0.5F,  0.5F};

struct LookupState final : DraftState {
    // The places where the voters have arrived; all of them agree with the guesses so far.
    struct Voters {
        std::array<MatchIndex::Match, kMostVoters> matches;
        size_t count = 0;
    };

    LookupState(size_t most_tokens, int max_tokens) : index(most_tokens) {
        guesses.reserve(static_cast<size_t>(max_tokens) + 1);
    }

    // Compares what came with what was guessed.
    void learn(std::span<const int32_t> tokens) {
        const auto came = tokens.subspan(seen);
        static_cast<void>(rates.compare(guesses, came));
        if (follows > 0) follows += static_cast<int>(came.size());
        seen = tokens.size();
        index.extend(tokens);
        guesses.clear();
    }

    // The token after the guesses so far. Leaves the voters that agree with it.
    Guess vote(std::span<const int32_t> tokens, Voters& voters) const {
        const auto token_of = [&](size_t voter) {
            const auto place = static_cast<size_t>(voters.matches[voter].next) + guesses.size();
            return place < tokens.size() ? tokens[place] : guesses[place - tokens.size()].token;
        };
        int32_t best = token_of(0);  // of equal votes the latest
        size_t most = 0;
        for (size_t i = 0; i < voters.count; ++i) {
            size_t votes = 0;
            for (size_t j = 0; j < voters.count; ++j)
                votes += static_cast<size_t>(token_of(j) == token_of(i));
            if (votes > most) {
                most = votes;
                best = token_of(i);
            }
        }
        const int length = voters.matches[0].length + static_cast<int>(guesses.size());
        const size_t kind = length_class(length) + (most < voters.count ? kLengthClasses : 0);
        size_t kept = 0;
        for (size_t i = 0; i < voters.count; ++i) {
            if (token_of(i) == best) voters.matches[kept++] = voters.matches[i];
        }
        voters.count = kept;
        return {best, kind};
    }

    MatchIndex index;
    HitRates<2 * kLengthClasses> rates{kBeliefs};
    std::vector<Guess> guesses;  // one more than are drafted: it teaches, too
    size_t seen = 0;             // tokens that were there when they were made
    int follows = 0;             // the place that the last match would be at by now; 0: none
};

void draft_one(LookupState& state, LookupMethod method, Request& request, int room, StepValue& value) {
    const std::span<const int32_t> tokens = request.tokens;
    state.learn(tokens);
    LookupState::Voters voters;
    const bool suffix = method == LookupMethod::kSuffix;
    voters.count = state.index.find(tokens, suffix ? kLongestSuffix : kLongestNgram, state.follows,
                                    std::span(voters.matches).first(suffix ? kMostVoters : 1));
    state.follows = voters.count > 0 ? voters.matches[0].next : 0;
    if (voters.count == 0) return;
    double probability = 1;  // that all guesses up to here are right
    for (int i = 0; i <= room; ++i) {
        const Guess guess = state.vote(tokens, voters);
        state.guesses.push_back(guess);
        probability *= state.rates.of(guess.kind);
        if (i == room || !value.worth(probability)) return;
        value.add(probability);
        request.drafts.push_back(guess.token);
    }
}

}  // namespace

std::unique_ptr<DraftState> LookupDrafter::begin(const Request& request) const {
    auto state = std::make_unique<LookupState>(request.tokens.capacity(), max_tokens_);
    state->learn(request.tokens);
    return state;
}

void LookupDrafter::draft(std::span<const DraftWish> wishes, StepValue& value) {
    for (const DraftWish& wish : wishes) {
        if (!value.worth(1)) return;
        draft_one(static_cast<LookupState&>(*wish.request->draft_state), method_, *wish.request, wish.room,
                  value);
    }
}

}  // namespace castiron
