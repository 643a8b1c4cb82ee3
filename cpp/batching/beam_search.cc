#include "batching/beam_search.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace castiron {

BeamSearch::BeamSearch(const SamplingParams& params, int max_new_tokens)
    : params_(params),
      width_(static_cast<size_t>(params.beam_width)),
      max_new_tokens_(max_new_tokens),
      wanted_(params.beam_width + static_cast<int>(params.stop_token_ids.size())),
      parents_(width_),
      offers_(width_ * static_cast<size_t>(wanted_)),
      num_offers_(width_) {
    Text empty;
    empty.tokens.resize(static_cast<size_t>(max_new_tokens));
    empty.logprobs.resize(static_cast<size_t>(max_new_tokens));
    live_.assign(width_, empty);
    next_.assign(width_, empty);
    finished_.assign(width_ + 1, empty);
    candidates_.reserve(offers_.size());
}

bool BeamSearch::choose() {
    rank_candidates();
    const bool last = length_ + 1 == max_new_tokens_;
    size_t live = 0;
    for (size_t rank = 0; rank < candidates_.size() && (rank < width_ || live < width_); ++rank) {
        const Candidate& candidate = candidates_[rank];
        if (last || params_.stops_at(candidate.token)) {
            if (rank < width_) finish(candidate);
        } else if (live < width_) {
            extend(next_[live], candidate);
            parents_[live++] = candidate.parent;
        }
    }
    live_.swap(next_);
    num_live_ = static_cast<int>(live);
    ++length_;
    return live > 0 && can_improve();
}

// Falling sums; of equal ones the better beam and the likelier token first.
void BeamSearch::rank_candidates() {
    candidates_.clear();
    for (int beam = 0; beam < num_live_; ++beam) {
        const auto offers =
            continuations(beam).first(static_cast<size_t>(num_offers_[static_cast<size_t>(beam)]));
        for (const TokenLogprob& offer : offers) {
            candidates_.push_back(
                {live_of(beam).sum + static_cast<double>(offer.logprob), offer.logprob, offer.token, beam});
        }
    }
    std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
        if (a.sum != b.sum) return a.sum > b.sum;
        if (a.parent != b.parent) return a.parent < b.parent;
        return a.token < b.token;
    });
}

void BeamSearch::extend(Text& text, const Candidate& candidate) const {
    const Text& parent = live_of(candidate.parent);
    std::copy_n(parent.tokens.begin(), length_, text.tokens.begin());
    std::copy_n(parent.logprobs.begin(), length_, text.logprobs.begin());
    text.tokens[static_cast<size_t>(length_)] = candidate.token;
    text.logprobs[static_cast<size_t>(length_)] = candidate.logprob;
    text.sum = candidate.sum;
}

void BeamSearch::finish(const Candidate& candidate) {
    Text& made = finished_[static_cast<size_t>(num_finished_)];
    extend(made, candidate);
    const bool stopped = params_.stops_at(candidate.token);
    made.stop_token = stopped ? candidate.token : -1;
    made.length = stopped ? length_ : length_ + 1;
    made.score = score_of(candidate.sum, length_ + 1);
    // Those that were there before come first among equals.
    for (auto place = static_cast<size_t>(num_finished_);
         place > 0 && finished_[place].score > finished_[place - 1].score; --place) {
        std::swap(finished_[place], finished_[place - 1]);
    }
    num_finished_ = std::min(num_finished_ + 1, static_cast<int>(width_));
}

double BeamSearch::score_of(double sum, int length) const {
    return sum / std::pow(static_cast<double>(length), static_cast<double>(params_.length_penalty));
}

// Whether the best live beam may still displace a finished text.
bool BeamSearch::can_improve() const {
    if (num_finished_ < static_cast<int>(width_)) return true;
    if (params_.early_stopping == EarlyStopping::kFirstFinished) return false;
    const bool longest = params_.early_stopping == EarlyStopping::kNever && params_.length_penalty > 0;
    const double hoped = score_of(live_of(0).sum, longest ? max_new_tokens_ : length_);
    return hoped > finished_[width_ - 1].score;
}

int BeamSearch::num_found_tokens() const {
    int count = 0;
    for (int i = 0; i < num_finished_; ++i) count += finished_[static_cast<size_t>(i)].length;
    return count;
}

std::vector<BeamOutput> BeamSearch::results() const {
    std::vector<BeamOutput> results;
    for (int i = 0; i < num_finished_; ++i) {
        const Text& text = finished_[static_cast<size_t>(i)];
        results.push_back({{text.tokens.begin(), text.tokens.begin() + text.length},
                           {text.logprobs.begin(), text.logprobs.begin() + text.length},
                           text.sum,
                           text.score,
                           text.stop_token});
    }
    return results;
}

}  // namespace castiron
