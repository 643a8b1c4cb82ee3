// What a step costs besides the device: scheduler_bench [running requests] [steps]
//
// A device that answers at once, a vocabulary of 64, greedy requests. Prints microseconds per step, from the
// engine's own trace: taking in, scheduling and packing, sampling; and all of a step by the wall clock,
// handing over included.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "batching/engine.h"

namespace {

constexpr int kVocab = 64;

class NullDevice : public castiron::Device {
public:
    explicit NullDevice(int rows) : logits_(static_cast<size_t>(rows) * kVocab) {
        for (size_t i = 0; i < logits_.size(); ++i) logits_[i] = static_cast<float>(i * 7 % 64);
    }
    uint64_t kv_block_bytes() const override { return 1; }
    void reserve_kv(int) override {}
    std::span<const float> forward(const castiron::Batch& batch) override {
        go.wait(false);  // the first step waits until every request is there
        return std::span(logits_).first(batch.logit_rows.size() * kVocab);
    }
    void copy_kv_block(int, int) override {}

    std::atomic<bool> go{false};

private:
    std::vector<float> logits_;
};

double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle * 1e6;
}

}  // namespace

int main(int argc, char** argv) {
    const int running = argc > 1 ? std::atoi(argv[1]) : 256;
    const int steps = argc > 2 ? std::atoi(argv[2]) : 1000;
    const castiron::Limits limits{running, std::max(32 * running, 8192), running, steps + 64};
    castiron::EngineOptions options;
    options.kv_cache_blocks = running * castiron::blocks_for_tokens(limits.max_seq_len);
    auto owned = std::make_unique<NullDevice>(running);
    NullDevice& device = *owned;
    castiron::Engine engine(std::move(owned), limits, kVocab, options);
    castiron::SamplingParams params;
    params.temperature = 0;
    params.max_tokens = steps;
    const std::vector<int32_t> prompt(32, 1);
    for (int i = 0; i < running; ++i) engine.submit(prompt, params);
    device.go = true;
    device.go.notify_all();
    int left = running;
    while (left > 0) {
        for (const castiron::Event& event : engine.poll(std::chrono::seconds(1)))
            left -= event.finished ? 1 : 0;
    }
    std::vector<double> intake, schedule, sample, whole;
    const auto records = engine.stats(1024).recent_steps;
    for (size_t i = 1; i < records.size(); ++i) {
        if (records[i].decode_tokens != running || records[i - 1].decode_tokens != running) continue;
        intake.push_back(records[i].intake);
        schedule.push_back(records[i].schedule);
        sample.push_back(records[i].sample);
        whole.push_back(records[i].start - records[i - 1].start);
    }
    if (whole.empty()) {
        std::printf("no step had all %d requests decoding; try more steps\n", running);
        return 1;
    }
    std::printf(
        "%d running, %zu steps, median us per step: intake %.1f, schedule %.1f, sample %.1f, whole %.1f\n",
        running, whole.size(), median(intake), median(schedule), median(sample), median(whole));
    return 0;
}
