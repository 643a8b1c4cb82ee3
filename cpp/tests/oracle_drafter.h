// A drafter that knows what the fake device will answer, and lies at times.
#pragma once

#include <random>
#include <vector>

#include "batching/request.h"
#include "sampling/sampler.h"
#include "speculation/drafter.h"
#include "tests/fake_device.h"
#include "tests/toy_grammar.h"

namespace castiron::testing {

class OracleDrafter : public Drafter {
public:
    // One guess in `lies` is drawn at random.
    OracleDrafter(int max_tokens, int vocab_size, uint32_t lies, uint32_t seed)
        : max_tokens_(max_tokens),
          vocab_size_(vocab_size),
          lies_(lies),
          random_(seed),
          sampler_(vocab_size, vocab_size) {}

    int max_tokens() const override { return max_tokens_; }
    std::unique_ptr<DraftState> begin(const Request&) const override {
        return std::make_unique<DraftState>();
    }
    void draft(std::span<const DraftWish> wishes, StepValue& value) override {
        std::vector<float> logits(static_cast<size_t>(vocab_size_));
        for (const DraftWish& wish : wishes) {
            Request& request = *wish.request;
            const int32_t shift = shift_of(request.adapter.get());
            std::vector<int32_t> history = request.tokens;
            for (int i = 0; i < wish.room && value.worth(0.9); ++i) {
                value.add(0.9);
                hashed_logits(shifted(history, shift), logits);
                const auto output = std::span(history).subspan(static_cast<size_t>(request.prompt_tokens));
                const uint32_t mask = toy_grammar(output);
                const std::span<const uint32_t> masked(&mask, request.constrained() ? 1 : 0);
                const SamplingContext context{request.params, request.seed, request.prompt(), output, masked};
                int32_t token = sampler_.sample(logits, context, {}).token;
                if (random_() % lies_ == 0) token = static_cast<int32_t>(random_()) % vocab_size_;
                request.drafts.push_back(std::abs(token));
                history.push_back(request.drafts.back());
            }
        }
    }
    void release(Request&) override { ++released; }

    int released = 0;

private:
    int max_tokens_;
    int vocab_size_;
    uint32_t lies_;
    std::mt19937 random_;
    Sampler sampler_;
};

}  // namespace castiron::testing
