// A record per step, the latest of them kept in a ring.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace castiron {

struct StepRecord {
    int64_t step = 0;  // 1 is the first
    double start = 0;  // seconds since the engine was made
    int prefill_tokens = 0;
    int decode_tokens = 0;
    int draft_tokens = 0;     // guesses that were checked
    int accepted_tokens = 0;  // of them: right
    int logit_rows = 0;
    int queried_tokens = 0;     // prompt tokens that were looked for in the prefix cache
    int cached_tokens = 0;      // prompt tokens that came from the cache instead of being computed
    int recomputed_tokens = 0;  // of those computed: again, after a preemption
    int preemptions = 0;
    int running = 0;  // requests, after the step
    int waiting = 0;
    int finished = 0;  // requests that ended in the step
    int kv_blocks_used = 0;
    int kv_blocks_cached = 0;
    int graph = 0;  // sequences of the CUDA graph that was replayed; 0: none was
    bool device_sampled = false;
    bool ahead = false;   // planned and started while the step before was on the device
    double intake = 0;    // seconds: taking in submissions and cancels
    double schedule = 0;  //          choosing what runs and packing it
    double draft = 0;     //          guessing what comes next
    double queued = 0;    //          behind the step before, on the device
    double forward = 0;   //          on the device, from then on
    double sample = 0;    //          choosing tokens
};

class StepTrace {
public:
    explicit StepTrace(size_t capacity) : ring_(capacity) {}

    void add(const StepRecord& record) { ring_[recorded_++ % ring_.size()] = record; }
    // The last `count` records or as many as there are, oldest first.
    [[nodiscard]] std::vector<StepRecord> last(size_t count) const {
        count = std::min({count, recorded_, ring_.size()});
        std::vector<StepRecord> records;
        records.reserve(count);
        for (size_t i = recorded_ - count; i < recorded_; ++i) records.push_back(ring_[i % ring_.size()]);
        return records;
    }

private:
    std::vector<StepRecord> ring_;
    size_t recorded_ = 0;
};

}  // namespace castiron
