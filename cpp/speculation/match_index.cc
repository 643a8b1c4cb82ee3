#include "speculation/match_index.h"

#include <algorithm>
#include <bit>

namespace castiron {
namespace {

// How many of the last tokens equal those before `next`.
int common_end(std::span<const int32_t> tokens, int next, int longest) {
    const auto end = static_cast<int>(tokens.size());
    const int most = std::min(next, longest);
    int length = 0;
    while (length < most &&
           tokens[static_cast<size_t>(next - 1 - length)] == tokens[static_cast<size_t>(end - 1 - length)]) {
        ++length;
    }
    return length;
}

}  // namespace

MatchIndex::MatchIndex(size_t most_tokens)
    : latest_(std::bit_ceil(most_tokens + 1), kNone), earlier_(most_tokens, kNone) {}

size_t MatchIndex::slot(int32_t before, int32_t last) const {
    const uint64_t pair = uint64_t{static_cast<uint32_t>(before)} << 32 | static_cast<uint32_t>(last);
    return static_cast<size_t>(pair * 0x9E3779B97F4A7C15U >> 32) & (latest_.size() - 1);
}

// The last pair stays outside: nothing has followed it yet.
void MatchIndex::extend(std::span<const int32_t> tokens) {
    for (; known_ + 1 < tokens.size(); ++known_) {
        int32_t& latest = latest_[slot(tokens[known_ - 1], tokens[known_])];
        earlier_[known_] = latest;
        latest = static_cast<int32_t>(known_);
    }
}

size_t MatchIndex::find(std::span<const int32_t> tokens, int longest, int hint,
                        std::span<Match> matches) const {
    if (tokens.size() < kShortest + 1 || matches.empty()) return 0;
    size_t count = 0;
    int best = kShortest;
    const auto look_at = [&](int next) {
        const int length = common_end(tokens, next, longest);
        if (length < best) return;
        if (length > best) count = 0;
        best = length;
        if (count < matches.size()) matches[count++] = {next, length};
    };
    if (hint > 0 && hint < static_cast<int>(tokens.size())) look_at(hint);
    int32_t place = latest_[slot(tokens[tokens.size() - 2], tokens[tokens.size() - 1])];
    for (int looks = 0; place != kNone && looks < kMostLooks; ++looks) {
        if (place + 1 != hint) look_at(place + 1);
        place = earlier_[static_cast<size_t>(place)];
    }
    return count;
}

}  // namespace castiron
