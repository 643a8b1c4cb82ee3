// The engine thread allocates nothing while it serves: operator new is counted per thread.
#include <doctest/doctest.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "batching/engine.h"

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
    explicit CountingDevice(int rows) : logits_(static_cast<size_t>(rows) * kVocab) {
        for (size_t i = 0; i < logits_.size(); ++i) logits_[i] = static_cast<float>(i * 31 % 97) * 0.1F;
    }
    uint64_t kv_block_bytes() const override { return 1; }
    void reserve_kv(int) override {}
    std::span<const float> forward(const Batch& batch) override {
        if (first < 0) first = allocations;
        latest = allocations;
        return std::span(logits_).first(batch.logit_rows.size() * kVocab);
    }
    void copy_kv_block(int, int) override {}

    int64_t first = -1;
    int64_t latest = -1;

private:
    std::vector<float> logits_;
};

}  // namespace

TEST_CASE("the engine thread allocates nothing while it serves") {
    const Limits limits{6, 32, 12, 200};
    auto owned = std::make_unique<CountingDevice>(limits.max_logit_rows);
    CountingDevice& device = *owned;
    EngineOptions options;
    options.kv_cache_blocks = 20;
    Engine engine(std::move(owned), limits, kVocab, options);
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
    CHECK(device.latest - device.first == 0);
}
