// Runs a planned step: packs it for the device, and turns the logits into tokens, on the device if it can.
#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "batching/logits_exchange.h"
#include "batching/sampling_plan.h"
#include "batching/scheduler.h"
#include "device/device.h"
#include "sampling/sampler.h"

namespace castiron {

// Holds the packed batch; allocates in the constructor only. One thread.
class StepRunner {
public:
    // What came of a step's chunks.
    struct Sampled {
        int right_drafts = 0;
        bool ended = false;   // some of its requests have ended
        bool failed = false;  // of them: with an error
    };

    // vocab_limit: ids from it on are never sampled.
    // tiers: where the moves of plans lead to, besides the pools.
    StepRunner(Device& device, const SchedulerLimits& limits, int vocab_size, int vocab_limit,
               const HostTiers& tiers = {});

    // Lays the plan out as rows of the batch. From here on its tokens count as computed.
    void pack(const StepPlan& plan);
    // Copies what the plan says and runs the packed batch, or lets the device begin with it (queued). What
    // the device throws passes through. Touches no request: the watchdog may end them all meanwhile.
    void start(const StepPlan& plan);
    // Waits until a queued step is done. What the device throws passes through.
    void finish(const StepPlan& plan);
    // Samples a token for every chunk that completes, and ends the requests that reach their end. Behind a
    // token that was drafted it samples the one after it, from the row of the draft, and counts the draft as
    // computed. Logits that cannot be sampled from end their own request only.
    [[nodiscard]] Sampled sample(const StepPlan& plan);
    // Has the rows of logits changed from which requests with processors choose; ends those that fail.
    void process_logits(const StepPlan& plan, LogitsExchange& exchange,
                        std::chrono::steady_clock::duration patience);
    // Whether the packed batch's tokens are chosen on the device.
    [[nodiscard]] bool device_samples() const { return device_samples_; }
    // Whether the packed batch is one that the device queues, so that the next may be packed before it is
    // done.
    [[nodiscard]] bool queued() const { return device_samples_ && device_.queues(); }

private:
    void pack_plain(const ScheduledChunk& chunk, int first_row);
    void pack_tokens(const ScheduledChunk& chunk, int first_row);
    static void count_started(const ScheduledChunk& chunk);
    void make(const BlockMove& move);
    void run(const StepPlan& plan, const Batch& batch);
    void check_sampled(const StepPlan& plan) const;
    void keep_prompt_rows(const ScheduledChunk& chunk, size_t first_row);
    void score_prompt(Request& request, size_t row, int position);
    [[nodiscard]] bool note_plain(const ScheduledChunk& chunk);
    void sample_next(Request& request, size_t row, size_t drafts = 0);
    void continue_beam(const ScheduledChunk& chunk, size_t row);
    [[nodiscard]] int sample_chunk(const ScheduledChunk& chunk);
    [[nodiscard]] int sample_drafted(const ScheduledChunk& chunk, size_t first_row);
    [[nodiscard]] SampledToken sampled_row(size_t row, std::span<TokenLogprob> top) const;

    Device& device_;
    const HostTiers tiers_;
    const bool has_window_blocks_;
    size_t vocab_size_;
    Sampler sampler_;
    std::vector<int32_t> token_ids_;
    std::vector<int32_t> token_sources_;
    std::vector<int32_t> positions_;
    std::vector<int32_t> logit_rows_;
    std::vector<SequenceSlice> sequences_;
    SamplingPlan sampling_;
    bool device_samples_ = false;
    std::span<const float> logits_;  // of a step whose tokens the host chooses
    SampledRows sampled_;            // of one whose tokens the device chose
};

}  // namespace castiron
