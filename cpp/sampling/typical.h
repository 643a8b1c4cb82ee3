// Typical sampling (Meister et al., 2022): the tokens whose surprise is nearest to the expected one.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace castiron {

// Holds scratch space for one row; allocates in the constructor only.
class TypicalFilter {
public:
    explicit TypicalFilter(size_t max_tokens) { tokens_.reserve(max_tokens); }

    // weights: 0 for tokens that are out already, and some that are not. Sets to 0 those that are not of the
    // smallest set whose mass reaches `mass` of theirs, when tokens are taken in order of |-log p - H|, p a
    // token's part of their mass and H the entropy; tokens as far off as the last of the set stay, as in
    // transformers. Returns the mass that is left.
    double keep(std::span<float> weights, float mass);

private:
    struct Token {
        double distance;
        double weight;
    };

    [[nodiscard]] double farthest_kept(double wanted);

    std::vector<Token> tokens_;
};

}  // namespace castiron
