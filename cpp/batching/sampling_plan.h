// What a device that samples is told about the rows of a step.
#pragma once

#include <vector>

#include "batching/scheduler.h"
#include "device/device.h"

namespace castiron {

// Whether devices that choose tokens know of all that the parameters ask for.
[[nodiscard]] bool devices_can_choose(const SamplingParams& params);

// Allocates in the constructor only.
class SamplingPlan {
public:
    SamplingPlan(const SchedulerLimits& limits, int vocab_limit);

    void clear();
    // Describes the rows of logits of the step's next chunk, those of drafts as if the drafts before them
    // were right: else nobody will ask. False when it asks for what devices lack (masks and rules, logits of
    // prompt or output, more than kMaxDeviceLogprobs log-probabilities, too many penalties at once): the host
    // samples the whole step then.
    [[nodiscard]] bool add(const ScheduledChunk& chunk) {
        if (!chunk.plain || chunk.request->row_sampling.temperature > 0) return add_any(chunk);
        rows_.push_back(chunk.request->row_sampling);
        return true;
    }
    [[nodiscard]] SamplingBatch batch() const { return {rows_, edits_}; }

private:
    [[nodiscard]] bool add_any(const ScheduledChunk& chunk);
    void add_row(const Request& request, size_t drafts);
    [[nodiscard]] bool add_edits(const Request& request, size_t drafts);

    int32_t vocab_limit_;
    std::vector<RowSampling> rows_;
    std::vector<LogitEdit> edits_;
};

}  // namespace castiron
