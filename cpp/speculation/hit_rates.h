// How often guesses of a kind were right lately.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace castiron {

struct Guess {
    int32_t token = 0;
    size_t kind = 0;
};

// Probabilities of `N` kinds of guesses, each a first belief that gives way to what was observed.
template <size_t N>
class HitRates {
public:
    explicit HitRates(const std::array<float, N>& beliefs) {
        for (size_t kind = 0; kind < N; ++kind) {
            tried_[kind] = kBelief;
            right_[kind] = kBelief * beliefs[kind];
        }
    }

    void observe(size_t kind, bool right) {
        tried_[kind] = kKept * tried_[kind] + 1;
        right_[kind] = kKept * right_[kind] + (right ? 1.0F : 0.0F);
    }
    // Observes the guesses up to the first wrong one; returns how many before it were right.
    size_t compare(std::span<const Guess> guesses, std::span<const int32_t> came) {
        const size_t count = std::min(came.size(), guesses.size());
        for (size_t i = 0; i < count; ++i) {
            const bool right = came[i] == guesses[i].token;
            observe(guesses[i].kind, right);
            if (!right) return i;
        }
        return count;
    }
    [[nodiscard]] double of(size_t kind) const { return static_cast<double>(right_[kind] / tried_[kind]); }

private:
    static constexpr float kBelief = 3;   // observations that a first belief counts as
    static constexpr float kKept = 0.9F;  // of the weight of older observations, at each new one

    std::array<float, N> tried_;
    std::array<float, N> right_;
};

}  // namespace castiron
