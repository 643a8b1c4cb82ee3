// How often guesses of a kind were right lately.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace castiron {

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
    [[nodiscard]] double of(size_t kind) const { return static_cast<double>(right_[kind] / tried_[kind]); }

private:
    static constexpr float kBelief = 3;   // observations that a first belief counts as
    static constexpr float kKept = 0.9F;  // of the weight of older observations, at each new one

    std::array<float, N> tried_;
    std::array<float, N> right_;
};

}  // namespace castiron
