// The engine thread allocates nothing while it serves: operator new is counted per thread.
#include <doctest/doctest.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "batching/engine.h"
#include "speculation/lookup_drafter.h"

namespace {
thread_local int64_t allocations = 0;
}

// Not inlined: gcc 12 would take the free() inside for a mismatch with operator new.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    ++allocations;
    if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
    ++allocations;
    return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

using namespace castiron;

namespace {

constexpr int kVocab = 300;

// Answers at once; notes how much its calling thread had allocated at the first and at the latest call.
class CountingDevice : public Device {
public:
    CountingDevice(int rows, bool on_device)
        : logits_(static_cast<size_t>(rows) * kVocab),
          on_device_(on_device),
          sampled_(static_cast<size_t>(rows)),
          top_ids_(sampled_.size() * kMaxDeviceLogprobs, 1),
          top_logprobs_(sampled_.size() * (1 + kMaxDeviceLogprobs)) {
        for (size_t i = 0; i < logits_.size(); ++i) logits_[i] = static_cast<float>(i * 31 % 97) * 0.1F;
    }
    uint64_t kv_block_bytes() const override { return 1; }
    void reserve_kv(int, int) override {}
    std::span<const float> forward(const Batch& batch) override {
        if (first < 0) first = allocations;
        latest = allocations;
        std::this_thread::sleep_for(delay);
        return std::span(logits_).first(batch.logit_rows.size() * kVocab);
    }
    bool samples() const override { return on_device_; }
    SampledRows forward_and_sample(const Batch& batch, const SamplingBatch&) override {
        static_cast<void>(forward(batch));
        const size_t rows = batch.logit_rows.size();
        for (size_t i = 0; i < rows; ++i) sampled_[i] = {static_cast<int32_t>(i), 0};
        return {std::span(sampled_).first(rows), std::span(top_ids_).first(rows * kMaxDeviceLogprobs),
                std::span(top_logprobs_).first(rows * (1 + kMaxDeviceLogprobs))};
    }
    void copy_kv_block(KvGroup, int, int) override {}

    int64_t first = -1;
    int64_t latest = -1;
    std::chrono::microseconds delay{0};  // of each step

private:
    std::vector<float> logits_;
    bool on_device_;
    std::vector<SampledRows::Row> sampled_;
    std::vector<int32_t> top_ids_;
    std::vector<float> top_logprobs_;
};

// Serves a mixed load and returns what the engine thread allocated between its first step and its last.
int64_t allocated_while_serving(bool on_device, std::unique_ptr<Drafter> drafter = nullptr) {
    const Limits limits{6, 32, 12, 200};
    auto owned = std::make_unique<CountingDevice>(limits.max_logit_rows, on_device);
    CountingDevice& device = *owned;
    EngineOptions options;
    options.kv_cache_blocks = 20;
    const bool drafts = drafter != nullptr;
    if (drafts) device.delay = std::chrono::microseconds(50);  // so that a row more costs little
    Engine engine(std::move(owned), limits, kVocab, options, std::move(drafter));
    size_t sent = 0;
    size_t ended = 0;
    for (int i = 0; i < 300; ++i) {
        SamplingParams params;
        params.max_tokens = 1 + i % 40;
        params.temperature = i % 3 == 0 ? 0.0F : 1.0F;
        params.top_k = i % 5 == 0 ? 20 : 0;
        params.top_p = i % 4 == 0 ? 0.9F : 1.0F;
        params.repetition_penalty = i % 7 == 0 ? 1.2F : 1.0F;
        params.logprobs = i % 6 - 1;
        params.context_logits = i % 9 == 0;
        params.prompt_logprobs = i % 8 == 0 ? 2 : -1;
        if (i % 10 == 0) params.beam_width = 3, params.logprobs = 0;
        params.stop_token_ids = {i % kVocab};
        const RequestId id = engine.submit(std::vector<int32_t>(static_cast<size_t>(1 + i % 90), 5), params);
        ++sent;
        if (i % 11 == 0) engine.cancel(id);
        if (i % 20 != 0) continue;
        for (const Event& event : engine.poll(std::chrono::milliseconds(1))) ended += event.finished ? 1 : 0;
    }
    while (ended < sent) {
        for (const Event& event : engine.poll(std::chrono::seconds(1))) ended += event.finished ? 1 : 0;
    }
    engine.shutdown();
    CHECK(allocations > 300);  // this thread's: the counter works
    CHECK(device.first >= 0);
    CHECK((engine.stats(0).device_sampled_steps > 0) == on_device);
    CHECK((engine.stats(0).draft_tokens > 100) == drafts);
    return device.latest - device.first;
}

}  // namespace

TEST_CASE("the engine thread allocates nothing while it serves") {
    CHECK(allocated_while_serving(false) == 0);
    CHECK(allocated_while_serving(true) == 0);
    for (const bool on_device : {false, true}) {
        CHECK(allocated_while_serving(on_device, std::make_unique<LookupDrafter>(LookupMethod::kSuffix, 5)) ==
              0);
    }
}
