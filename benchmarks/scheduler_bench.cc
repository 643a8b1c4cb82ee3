// What a step costs besides the device: scheduler_bench [running requests] [steps]
//
// A device that answers at once, a vocabulary of 64, greedy requests that all decode. Prints microseconds of
// the engine thread's CPU time per step, from one call of the device to the next: with the tokens chosen by
// the device (what is left is the scheduler's own: taking in, scheduling, packing, noting tokens, events),
// and with the sampler on the host. Then what looking up a prompt of 32,768 cached tokens takes.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "batching/engine.h"

namespace {

constexpr int kVocab = 64;

double thread_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

class NullDevice : public castiron::Device {
public:
    NullDevice(int rows, int steps, bool on_device)
        : on_device_(on_device),
          logits_(static_cast<size_t>(rows) * kVocab),
          sampled_(static_cast<size_t>(rows)) {
        for (size_t i = 0; i < logits_.size(); ++i) logits_[i] = static_cast<float>(i * 7 % 64);
        for (auto& row : sampled_) row = {3, 0};
        times.reserve(static_cast<size_t>(steps) + 64);
    }
    uint64_t kv_block_bytes() const override { return 1; }
    void reserve_kv(int, int) override {}
    std::span<const float> forward(const castiron::Batch& batch) override {
        go.wait(false);  // the first step waits until every request is there
        if (batch.token_ids.size() == sampled_.size()) times.push_back(thread_seconds());
        return std::span(logits_).first(batch.logit_rows.size() * kVocab);
    }
    bool samples() const override { return on_device_; }
    castiron::SampledRows forward_and_sample(const castiron::Batch& batch,
                                             const castiron::SamplingBatch&) override {
        static_cast<void>(forward(batch));
        return {std::span(sampled_).first(batch.logit_rows.size()), {}, {}};
    }
    void copy_kv_block(castiron::KvGroup, int, int) override {}

    std::atomic<bool> go{false};
    std::vector<double> times;  // of the steps with a full batch

private:
    bool on_device_;
    std::vector<float> logits_;
    std::vector<castiron::SampledRows::Row> sampled_;
};

// Microseconds: the value below which `part` of the others lie.
double quantile(std::vector<double> values, double part) {
    const auto at =
        values.begin() + static_cast<std::ptrdiff_t>(part * static_cast<double>(values.size() - 1));
    std::nth_element(values.begin(), at, values.end());
    return *at * 1e6;
}

void measure_steps(int running, int steps, bool on_device) {
    const castiron::Limits limits{running, std::max(32 * running, 8192), running, steps + 64};
    castiron::EngineOptions options;
    options.kv_cache_blocks = running * castiron::blocks_for_tokens(limits.max_seq_len);
    auto owned = std::make_unique<NullDevice>(running, steps, on_device);
    NullDevice& device = *owned;
    castiron::Engine engine(std::move(owned), limits, kVocab, options);
    castiron::SamplingParams params;
    params.temperature = 0;
    params.max_tokens = steps;
    for (int i = 0; i < running; ++i) {
        std::vector<int32_t> prompt(32, 1);
        for (size_t bit = 0; bit < 16; ++bit) prompt[bit] = (i >> bit) & 1;
        engine.submit(prompt, params);
    }
    device.go = true;
    device.go.notify_all();
    int left = running;
    while (left > 0) {
        for (const castiron::Event& event : engine.poll(std::chrono::seconds(1)))
            left -= event.finished ? 1 : 0;
        // A real step takes milliseconds, so its caller does not get in its way all the time.
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    engine.shutdown();
    std::vector<double> whole, schedule;
    for (size_t i = 1; i < device.times.size(); ++i) whole.push_back(device.times[i] - device.times[i - 1]);
    for (const auto& record : engine.stats(1024).recent_steps) {
        if (record.decode_tokens == running) schedule.push_back(record.schedule);
    }
    if (whole.empty()) {
        std::printf("no step had all %d requests decoding; try more steps\n", running);
        return;
    }
    std::printf(
        "%d running, tokens chosen by the %s: %.1f us a step (median of %zu; a tenth below %.1f), of it "
        "scheduling and packing %.1f by the wall clock\n",
        running, on_device ? "device" : "host", quantile(whole, 0.5), whole.size(), quantile(whole, 0.1),
        quantile(schedule, 0.5));
}

void measure_lookup() {
    constexpr int kTokens = 32768;
    castiron::BlockPool pool(3 * kTokens / castiron::kBlockTokens);
    std::vector<int32_t> prompt(kTokens);
    for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i * i % 49157);
    std::vector<double> times;
    for (int turn = 0; turn < 200; ++turn) {
        castiron::BlockTable table(kTokens + 1, {true, 0, {}});
        std::optional<castiron::BlockCopy> copy;
        const double begin = thread_seconds();
        const int found = table.reuse(pool, prompt, 0, copy);
        const double end = thread_seconds();
        if (turn == 0) {
            if (!table.reserve(pool, kTokens)) return;
            table.grow(pool, kTokens);
            table.keep(pool, prompt, kTokens);
        } else if (found == kTokens) {
            times.push_back(end - begin);
        }
        table.close(pool);
    }
    std::printf("looking up %d cached tokens: %.1f us (median of %zu)\n", kTokens, quantile(times, 0.5),
                times.size());
}

}  // namespace

int main(int argc, char** argv) {
    const int running = argc > 1 ? std::atoi(argv[1]) : 256;
    const int steps = argc > 2 ? std::atoi(argv[2]) : 1000;
    measure_steps(running, steps, true);
    measure_steps(running, steps, false);
    measure_lookup();
    return 0;
}
