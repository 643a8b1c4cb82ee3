#include "sampling/token_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace castiron {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

void require_token(int32_t token, int vocab_size, const char* field) {
    if (token >= 0 && token < vocab_size) return;
    throw std::invalid_argument("an entry of " + std::string(field) + " is " + std::to_string(token) +
                                "; expected an id of the vocabulary, 0 to " + std::to_string(vocab_size - 1));
}

void forbid(std::span<float> row, int32_t token) {
    if (static_cast<size_t>(token) < row.size()) row[static_cast<size_t>(token)] = kForbidden;
}

void keep_only(std::span<float> row, std::span<const int32_t> allowed) {
    // `allowed` is ascending: what lies between two of its entries is forbidden.
    size_t next = 0;
    for (const int32_t token : allowed) {
        const auto id = std::min(static_cast<size_t>(token), row.size());
        std::fill(row.begin() + static_cast<std::ptrdiff_t>(next),
                  row.begin() + static_cast<std::ptrdiff_t>(std::max(next, id)), kForbidden);
        next = std::max(next, std::min(id + 1, row.size()));
    }
    std::fill(row.begin() + static_cast<std::ptrdiff_t>(next), row.end(), kForbidden);
}

void forbid_bad_words(std::span<float> row, const std::vector<std::vector<int32_t>>& words,
                      std::span<const int32_t> output) {
    for (const std::vector<int32_t>& word : words) {
        const std::span<const int32_t> begun = std::span(word).first(word.size() - 1);
        if (begun.size() > output.size()) continue;
        if (std::ranges::equal(begun, output.last(begun.size()))) forbid(row, word.back());
    }
}

// Token i of the two spans seen as one.
int32_t at(std::span<const int32_t> prompt, std::span<const int32_t> output, size_t i) {
    return i < prompt.size() ? prompt[i] : output[i - prompt.size()];
}

void forbid_repeated(std::span<float> row, size_t length, std::span<const int32_t> prompt,
                     std::span<const int32_t> output) {
    const size_t count = prompt.size() + output.size();
    const size_t begun = length - 1;
    if (count < length) return;
    for (size_t start = 0; start + length <= count; ++start) {
        size_t same = 0;
        while (same < begun && at(prompt, output, start + same) == at(prompt, output, count - begun + same))
            ++same;
        if (same == begun) forbid(row, at(prompt, output, start + begun));
    }
}

}  // namespace

void TokenRules::validate(int vocab_size) const {
    for (const int32_t token : allowed) require_token(token, vocab_size, "allowed_token_ids");
    if (!std::ranges::is_sorted(allowed)) throw std::invalid_argument("allowed_token_ids must be ascending");
    for (const std::vector<int32_t>& word : bad_words) {
        if (word.empty()) throw std::invalid_argument("an entry of bad_words has no token");
        for (const int32_t token : word) require_token(token, vocab_size, "bad_words");
    }
    if (no_repeat_ngram < 0) {
        throw std::invalid_argument("no_repeat_ngram_size is " + std::to_string(no_repeat_ngram) +
                                    "; expected 0 (off) or more");
    }
    for (const TokenBias& entry : bias) {
        require_token(entry.token, vocab_size, "logit_bias");
        if (std::isfinite(entry.bias)) continue;
        throw std::invalid_argument("the logit_bias of token " + std::to_string(entry.token) +
                                    " is not a finite number");
    }
}

void TokenRules::apply(std::span<float> row, std::span<const int32_t> prompt,
                       std::span<const int32_t> output) const {
    if (!allowed.empty()) keep_only(row, allowed);
    forbid_bad_words(row, bad_words, output);
    if (no_repeat_ngram > 0) forbid_repeated(row, static_cast<size_t>(no_repeat_ngram), prompt, output);
    for (const TokenBias& entry : bias) {
        if (static_cast<size_t>(entry.token) < row.size())
            row[static_cast<size_t>(entry.token)] += entry.bias;
    }
}

void apply_mask(std::span<const uint32_t> mask, std::span<float> row) {
    for (size_t first = 0; first < row.size(); first += 32) {
        const uint32_t word = first / 32 < mask.size() ? mask[first / 32] : 0;
        if (word == ~uint32_t{0}) continue;
        const size_t end = std::min(row.size(), first + 32);
        for (size_t i = first; i < end; ++i) {
            if ((word >> (i - first) & 1U) == 0) row[i] = kForbidden;
        }
    }
}

}  // namespace castiron
