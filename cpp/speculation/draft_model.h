// Guesses of a second, smaller model with the same tokens.
#pragma once

#include <memory>
#include <vector>

#include "device/device.h"
#include "kv/block_pool.h"
#include "sampling/sampler.h"
#include "speculation/drafter.h"

namespace castiron {

// Runs its own program, with a KV cache of its own, for all requests of a step together: one pass for what a
// request has said since the last time, then a pass for each further guess. It chooses as the model would
// choose, by the request's parameters and the same random number, so that two models that agree on the
// distribution agree on most tokens.
//
// How far a guess can be trusted is learnt for each request from the probability that the draft model gives
// it; a request goes on as long as another guess is worth its row and its share of a pass. Where even the
// first is not, one is tried now and then. Allocates in the constructor and in begin(). A model whose device
// fails guesses no more, and stderr says why.
class DraftModel final : public Drafter {
public:
    // Throws std::invalid_argument where the device's memory has no room for the cache.
    // vocab_size: of the draft model's logits. vocab_limit: ids from it on are never guessed.
    DraftModel(std::unique_ptr<Device> device, const Limits& limits, int vocab_size, int vocab_limit,
               int max_tokens);

    [[nodiscard]] int max_tokens() const override { return max_tokens_; }
    [[nodiscard]] std::unique_ptr<DraftState> begin(const Request& request) const override;
    void draft(std::span<const DraftWish> wishes, StepValue& value) override;
    void release(Request& request) override;

private:
    struct State;
    // A request that takes part in the next pass.
    struct Part {
        Request* request = nullptr;
        State* state = nullptr;
        int room = 0;
        int tokens = 0;          // to be fed
        bool completes = false;  // a guess comes of it
        double probability = 1;  // that all guesses up to here are right
    };

    [[nodiscard]] bool join(const DraftWish& wish, const StepValue& value);
    void size_chunks();
    void pass();
    void guess(StepValue& value);

    std::unique_ptr<Device> device_;
    const Limits limits_;
    size_t vocab_size_;
    int max_tokens_;
    BlockPool pool_;
    Sampler sampler_;
    StepCost cost_;
    bool failed_ = false;
    std::span<const float> logits_;
    std::vector<Part> parts_;
    std::vector<int32_t> token_ids_;
    std::vector<int32_t> positions_;
    std::vector<int32_t> logit_rows_;
    std::vector<SequenceSlice> sequences_;
};

}  // namespace castiron
