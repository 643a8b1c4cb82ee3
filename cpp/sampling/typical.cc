#include "sampling/typical.h"

#include <algorithm>
#include <cmath>

namespace castiron {

double TypicalFilter::keep(std::span<float> weights, float mass) {
    double sum = 0;
    double weighted_logs = 0;
    for (const float weight : weights) {
        if (weight == 0.0F) continue;
        const auto w = static_cast<double>(weight);
        sum += w;
        weighted_logs += w * std::log(w);
    }
    // With p = w / sum: -log p - H = sum(w log w) / sum - log w; the log of the sum falls out.
    const double center = weighted_logs / sum;
    const auto distance = [center](float weight) {
        return std::abs(center - std::log(static_cast<double>(weight)));
    };
    tokens_.clear();
    for (const float weight : weights) {
        if (weight != 0.0F) tokens_.push_back({distance(weight), static_cast<double>(weight)});
    }
    const double farthest = farthest_kept(sum * static_cast<double>(mass));
    double left = 0;
    for (float& weight : weights) {
        if (weight == 0.0F) continue;
        if (distance(weight) > farthest) weight = 0;
        left += static_cast<double>(weight);
    }
    return left;
}

// Of the tokens in order of distance, the first where the weights add up to `wanted`. Halves what it looks at
// instead of sorting it.
double TypicalFilter::farthest_kept(double wanted) {
    const auto nearer = [](const Token& a, const Token& b) { return a.distance < b.distance; };
    auto begin = tokens_.begin();
    auto end = tokens_.end();
    double before = 0;
    while (end - begin > 1) {
        const auto middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, nearer);
        double half = 0;
        for (auto token = begin; token != middle; ++token) half += token->weight;
        if (before + half >= wanted) {
            end = middle;
        } else {
            before += half;
            begin = middle;
        }
    }
    return begin->distance;
}

}  // namespace castiron
