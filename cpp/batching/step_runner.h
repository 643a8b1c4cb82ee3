// Runs a planned step: packs it for the device, and turns the logits into tokens.
#pragma once

#include <span>
#include <vector>

#include "batching/scheduler.h"
#include "device/device.h"
#include "sampling/sampler.h"

namespace castiron {

// Holds the packed batch; allocates in the constructor only. One thread.
class StepRunner {
public:
    // vocab_limit: ids from it on are never sampled.
    StepRunner(Device& device, const SchedulerLimits& limits, int vocab_size, int vocab_limit);

    // Lays the plan out as rows of the batch.
    void pack(const StepPlan& plan);
    // Runs the packed batch. What the device throws passes through.
    void forward();
    // Counts the plan's tokens as computed, samples a token for every chunk that completes, and ends the
    // requests that reach their end. Logits that cannot be sampled from end their own request only.
    void sample(const StepPlan& plan);

private:
    void keep_context_logits(const ScheduledChunk& chunk, const float* rows);
    void sample_next(Request& request, std::span<const float> logits);

    Device& device_;
    size_t vocab_size_;
    Sampler sampler_;
    std::vector<int32_t> token_ids_;
    std::vector<int32_t> positions_;
    std::vector<int32_t> logit_rows_;
    std::vector<SequenceSlice> sequences_;
    std::span<const float> logits_;
};

}  // namespace castiron
