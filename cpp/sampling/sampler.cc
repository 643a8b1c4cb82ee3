#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "sampling/philox.h"

namespace castiron {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Falling value, then rising id: a total order, so that ties never depend on how a selection went about it.
constexpr auto kLikelierFirst = [](const auto& a, const auto& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
};

}  // namespace

Sampler::Sampler(int vocab_size, int vocab_limit)
    : vocab_size_(static_cast<size_t>(vocab_size)),
      vocab_limit_(static_cast<size_t>(vocab_limit)),
      typical_(static_cast<size_t>(vocab_limit)) {
    row_.resize(vocab_limit_);
    block_max_.resize(row_math::num_blocks(vocab_limit_));
    block_mass_.resize(block_max_.size());
    block_peak_.resize(block_max_.size());
    weight_values_.resize(block_max_.size() * row_math::kBlock);
    weights_ = {weight_values_, block_mass_, block_peak_};
    block_scratch_.resize(row_math::num_blocks(vocab_size_));
    counts_.resize(vocab_limit_, 0);
    candidates_.reserve(vocab_limit_);
}

SampledToken Sampler::sample(std::span<const float> logits, const SamplingContext& context,
                             std::span<TokenLogprob> top) {
    const SamplingParams& params = context.params;
    std::span<const float> row = (context.changed.empty() ? logits : context.changed).first(vocab_limit_);
    row_math::Scan scan = row_math::scan(row, block_max_);
    SampledToken result;
    if (scan.has_nan || scan.max == kInfinity) {
        result.status = SampleStatus::kNotFinite;
        return result;
    }
    if (changes(context)) {
        std::copy(row.begin(), row.end(), row_.begin());
        apply_changes(context);
        row = row_;
        scan = row_math::scan(row, block_max_);
    }
    if (scan.max == -kInfinity) {
        result.status = SampleStatus::kNothingAllowed;
        return result;
    }
    if (params.greedy()) {
        result.token = row_math::first_position(row, block_max_, scan.max);
    } else {
        const double uniform = uniform_at(context.seed, context.prompt.size() + context.output.size());
        const bool few = params.top_k > 0 && static_cast<size_t>(params.top_k) < vocab_limit_;
        const float top_p = params.top_p_after(context.output);
        result.token = few ? draw_from_top_k(row, params, top_p, uniform)
                           : draw_from_row(row, scan.max, params, top_p, uniform);
    }
    if (params.logprobs >= 0) {
        const size_t wanted = std::min(top.size(), static_cast<size_t>(params.logprobs));
        result.num_top = write_logprobs(logits, result.token, result.logprob, top.first(wanted));
    }
    return result;
}

void Sampler::mask_stop_tokens(const SamplingParams& params) {
    for (const int32_t id : params.stop_token_ids) {
        if (static_cast<size_t>(id) < vocab_limit_) row_[static_cast<size_t>(id)] = -kInfinity;
    }
}

// Whether anything changes the logits before the choice.
bool Sampler::changes(const SamplingContext& context) const {
    const SamplingParams& params = context.params;
    const bool may_stop = static_cast<int>(context.output.size()) >= params.min_tokens;
    return !params.rules.empty() || !context.mask.empty() || params.has_penalties() ||
           (!may_stop && !params.stop_token_ids.empty());
}

// To row_.
void Sampler::apply_changes(const SamplingContext& context) {
    const SamplingParams& params = context.params;
    if (!context.mask.empty()) apply_mask(context.mask, row_);
    params.rules.apply(row_, context.prompt, context.output);
    if (static_cast<int>(context.output.size()) < params.min_tokens) mask_stop_tokens(params);
    if (params.has_penalties()) apply_penalties(context);
}

SampledToken Sampler::continuations(std::span<const float> logits, const SamplingContext& context,
                                    std::span<TokenLogprob> out) {
    SampledToken result;
    if (!has_finite_max(logits)) {
        result.status = SampleStatus::kNotFinite;
        return result;
    }
    const double log_sum = log_sum_exp(logits);
    for (size_t i = 0; i < vocab_limit_; ++i) {
        row_[i] = static_cast<float>(static_cast<double>(logits[i]) - log_sum);
    }
    if (changes(context)) apply_changes(context);
    static_cast<void>(row_math::scan(row_, block_max_));
    select_top(row_, out.size());
    for (size_t i = 0; i < candidates_.size(); ++i) out[i] = {candidates_[i].id, candidates_[i].value};
    result.num_top = static_cast<int>(candidates_.size());
    return result;
}

bool Sampler::has_finite_max(std::span<const float> logits) {
    const row_math::Scan scan = row_math::scan(logits.first(vocab_limit_), block_max_);
    return !scan.has_nan && std::isfinite(scan.max);
}

double Sampler::log_sum_exp(std::span<const float> logits) {
    const float max = row_math::scan(logits, block_scratch_).max;
    return static_cast<double>(max) + std::log(row_math::sum_exp(logits, max));
}

void Sampler::apply_penalties(const SamplingContext& context) {
    const SamplingParams& params = context.params;
    const auto for_each_known = [this](std::span<const int32_t> tokens, auto visit) {
        for (const int32_t token : tokens) {
            const auto id = static_cast<size_t>(token);
            if (id < vocab_limit_) visit(row_[id], counts_[id]);
        }
    };
    if (params.repetition_penalty != 1.0F) {
        const auto penalize_once = [&](float& logit, int32_t& seen) {
            if (seen++ > 0) return;
            logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
        };
        const auto reset = [](float&, int32_t& seen) { seen = 0; };
        for_each_known(context.prompt, penalize_once);
        for_each_known(context.output, penalize_once);
        for_each_known(context.prompt, reset);
        for_each_known(context.output, reset);
    }
    if (params.presence_penalty != 0.0F || params.frequency_penalty != 0.0F) {
        for_each_known(context.output, [](float&, int32_t& count) { ++count; });
        for_each_known(context.output, [&](float& logit, int32_t& count) {
            if (count == 0) return;
            logit -= params.frequency_penalty * static_cast<float>(count) + params.presence_penalty;
            count = 0;
        });
    }
}

// Leaves the `count` likeliest of the row in candidates_, likeliest first; masked tokens are left out.
// block_max_ holds the row's block maxima. The count-th largest of them bounds
// the count-th largest entry from below, so that most blocks need not be looked at.
void Sampler::select_top(std::span<const float> row, size_t count) {
    candidates_.clear();
    if (count == 0) return;
    float threshold = -kInfinity;
    const size_t blocks = row_math::num_blocks(row.size());
    if (count <= blocks) {
        std::copy_n(block_max_.begin(), blocks, block_scratch_.begin());
        const auto nth = block_scratch_.begin() + static_cast<std::ptrdiff_t>(count - 1);
        std::nth_element(block_scratch_.begin(), nth,
                         block_scratch_.begin() + static_cast<std::ptrdiff_t>(blocks), std::greater<>());
        threshold = *nth;
    }
    for (size_t block = 0; block < blocks; ++block) {
        if (block_max_[block] < threshold || block_max_[block] == -kInfinity) continue;
        const size_t end = std::min(row.size(), (block + 1) * row_math::kBlock);
        for (size_t i = block * row_math::kBlock; i < end; ++i) {
            if (row[i] >= threshold && row[i] != -kInfinity) {
                candidates_.push_back({row[i], static_cast<int32_t>(i)});
            }
        }
    }
    if (candidates_.size() > count) {
        std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(count - 1),
                         candidates_.end(), kLikelierFirst);
        candidates_.resize(count);
    }
    std::sort(candidates_.begin(), candidates_.end(), kLikelierFirst);
}

int32_t Sampler::draw_from_top_k(std::span<const float> row, const SamplingParams& params, float top_p,
                                 double uniform) {
    select_top(row, static_cast<size_t>(params.top_k));
    const double max = static_cast<double>(candidates_.front().value);
    double mass = 0;
    for (Candidate& candidate : candidates_) {
        candidate.value = static_cast<float>(
            std::exp((static_cast<double>(candidate.value) - max) / static_cast<double>(params.temperature)));
        mass += static_cast<double>(candidate.value);
    }
    // The likeliest token has weight 1, so a weight is a ratio to it: what min-p compares.
    double kept = 0;
    size_t count = 0;
    const double wanted = static_cast<double>(top_p) * mass;
    while (count < candidates_.size() && (count == 0 || top_p >= 1.0F || kept < wanted) &&
           candidates_[count].value >= params.min_p && candidates_[count].value > 0.0F) {
        kept += static_cast<double>(candidates_[count++].value);
    }
    if (params.typical_p < 1.0F) kept = keep_typical(count, params.typical_p);
    const double target = uniform * kept;
    double passed = 0;
    int32_t drawn = -1;
    for (size_t i = 0; i < count && passed <= target; ++i) {
        if (candidates_[i].value == 0.0F) continue;
        drawn = candidates_[i].id;
        passed += static_cast<double>(candidates_[i].value);
    }
    return drawn;
}

// Of the first `count` candidates, which hold weights; the others become 0. Returns the mass that is left.
double Sampler::keep_typical(size_t count, float typical_p) {
    const auto weights = std::span(weight_values_).first(count);
    for (size_t i = 0; i < count; ++i) weights[i] = candidates_[i].value;
    const double mass = typical_.keep(weights, typical_p);
    for (size_t i = 0; i < count; ++i) candidates_[i].value = weights[i];
    return mass;
}

int32_t Sampler::draw_from_row(std::span<const float> row, float max, const SamplingParams& params,
                               float top_p, double uniform) {
    double mass = row_math::weigh(row, max, 1.0F / params.temperature, weights_);
    row_math::Cut cut{0.0F, -1};  // keeps every weight above 0
    if (top_p < 1.0F) cut = top_p_cut(mass, top_p);
    if (params.min_p > cut.weight) cut = {params.min_p, std::numeric_limits<int32_t>::max()};
    if (params.typical_p < 1.0F) {
        for (size_t i = 0; i < weight_values_.size(); ++i) {
            if (!cut.keeps(weight_values_[i], static_cast<int32_t>(i))) weight_values_[i] = 0.0F;
        }
        static_cast<void>(typical_.keep(weight_values_, params.typical_p));
        cut = {0.0F, -1};
        mass = row_math::kept_mass(weights_, cut);
    } else if (cut.weight > 0.0F) {
        mass = row_math::kept_mass(weights_, cut);
    }

    const double target = uniform * mass;
    double passed = 0;
    double before = 0;  // the mass of all blocks before `block`
    size_t block = 0;
    for (size_t i = 0; i < block_mass_.size() && passed <= target; ++i) {
        if (block_mass_[i] == 0.0F) continue;
        block = i;
        before = passed;
        passed += static_cast<double>(block_mass_[i]);
    }
    passed = before;
    // Rounding may end either walk before the target is passed: then the last kept token it is.
    int32_t drawn = -1;
    for (size_t i = block * row_math::kBlock; i < (block + 1) * row_math::kBlock; ++i) {
        const auto id = static_cast<int32_t>(i);
        if (weight_values_[i] == 0.0F || !cut.keeps(weight_values_[i], id)) continue;
        drawn = id;
        passed += static_cast<double>(weight_values_[i]);
        if (passed > target) break;
    }
    return drawn;
}

// The smallest set of mass >= top_p: its cut is first closed in by bisection with passes over the whole row,
// until few enough tokens lie between the bounds to be sorted.
row_math::Cut Sampler::top_p_cut(double mass, float top_p) {
    constexpr int64_t kSortable = 384;
    const double wanted = mass * static_cast<double>(top_p);
    // Tokens lighter than `low` weigh less than (1 - top_p) together, so the cut is not below it.
    float low = std::max(
        static_cast<float>((1.0 - static_cast<double>(top_p)) * mass / static_cast<double>(vocab_limit_)),
        std::numeric_limits<float>::min());
    float high = std::nextafter(1.0F, 2.0F);
    row_math::Mass from_low = row_math::mass_from(weights_, low);
    row_math::Mass from_high{0, 0};
    while (from_low.count - from_high.count > kSortable) {
        const float middle = std::sqrt(low * high);
        if (middle <= low || middle >= high)
            break;  // equal weights; sorting them all by id is all that is left
        const row_math::Mass from_middle = row_math::mass_from(weights_, middle);
        if (from_middle.sum >= wanted) {
            low = middle;
            from_low = from_middle;
        } else {
            high = middle;
            from_high = from_middle;
        }
    }
    candidates_.clear();
    for (size_t block = 0; block < block_mass_.size(); ++block) {
        if (block_peak_[block] < low) continue;
        for (size_t i = block * row_math::kBlock; i < (block + 1) * row_math::kBlock; ++i) {
            const float weight = weight_values_[i];
            if (weight >= low && weight < high) candidates_.push_back({weight, static_cast<int32_t>(i)});
        }
    }
    std::sort(candidates_.begin(), candidates_.end(), kLikelierFirst);
    double kept = from_high.sum;
    for (const Candidate& candidate : candidates_) {
        kept += static_cast<double>(candidate.value);
        if (kept >= wanted) return {candidate.value, candidate.id};
    }
    return {low, std::numeric_limits<int32_t>::max()};
}

SampledToken Sampler::score(std::span<const float> logits, int32_t token, std::span<TokenLogprob> top) {
    SampledToken result;
    result.token = token;
    if (!has_finite_max(logits)) {
        result.status = SampleStatus::kNotFinite;
        return result;
    }
    result.num_top = write_logprobs(logits, token, result.logprob, top);
    return result;
}

int Sampler::write_logprobs(std::span<const float> logits, int32_t token, float& logprob,
                            std::span<TokenLogprob> top) {
    const double log_sum = log_sum_exp(logits);
    const auto of = [&](float logit) { return static_cast<float>(static_cast<double>(logit) - log_sum); };
    logprob = of(logits[static_cast<size_t>(token)]);
    if (top.empty()) return 0;
    const std::span<const float> row = logits.first(vocab_limit_);
    static_cast<void>(row_math::scan(row, block_max_));
    select_top(row, top.size());
    for (size_t i = 0; i < candidates_.size(); ++i) top[i] = {candidates_[i].id, of(candidates_[i].value)};
    return static_cast<int>(candidates_.size());
}

}  // namespace castiron
