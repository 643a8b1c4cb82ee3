// Guesses that the text goes on as it went on before.
#pragma once

#include "speculation/drafter.h"

namespace castiron {

enum class LookupMethod : uint8_t {
    kNgram,   // prompt lookup: what followed the latest occurrence of the last two to four tokens
    kSuffix,  // what followed most occurrences of the longest end of the text that was there before
};

// Looks in a request's own prompt and output. How far a guess can be trusted is learnt for each request and
// each length of match, from every token that it generates, guessed or not: where looking things up does not
// help, no guess is made, and when it begins to help, that is noticed without trying.
class LookupDrafter final : public Drafter {
public:
    LookupDrafter(LookupMethod method, int max_tokens) : method_(method), max_tokens_(max_tokens) {}

    [[nodiscard]] int max_tokens() const override { return max_tokens_; }
    [[nodiscard]] std::unique_ptr<DraftState> begin(const Request& request) const override;
    void draft(std::span<const DraftWish> wishes, StepValue& value) override;

private:
    LookupMethod method_;
    int max_tokens_;
};

}  // namespace castiron
