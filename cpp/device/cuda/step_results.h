// What comes back from a step, in pinned host memory.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "device/cuda/handles.h"
#include "device/cuda/step_queue.h"
#include "device/device.h"
#include "program/program.h"

namespace castiron::cuda {

class StepResults {
public:
    StepResults() = default;
    // `values`: addresses of the program's values; slots: those that steps with sampling use. Throws
    // std::invalid_argument when the program lacks a value that is read here.
    StepResults(const Driver& driver, const Program& program, const std::vector<Address>& values,
                size_t slots);

    // Enqueues the copies. Nothing for 0 rows.
    void fetch_logits(const Driver& driver, int64_t rows, StreamHandle stream) const;
    void fetch_sampled(const Driver& driver, int64_t rows, bool logprobs, size_t slot,
                       StreamHandle stream) const;

    // What was fetched last, after the stream has come so far.
    [[nodiscard]] std::span<const float> logits(size_t rows) const;
    [[nodiscard]] SampledRows sampled(size_t rows, bool logprobs, size_t slot) const;

    [[nodiscard]] uint64_t bytes() const { return bytes_; }

private:
    struct Fetched {
        Address address = 0;
        std::array<PinnedBuffer, kStepSlots> hosts;
        uint64_t row_bytes = 0;
    };

    [[nodiscard]] Fetched make(const Driver& driver, const Program& program,
                               const std::vector<Address>& values, const char* name, DType dtype,
                               int64_t columns, size_t slots);
    static void fetch(const Driver& driver, const Fetched& result, int64_t rows, size_t slot,
                      StreamHandle stream);

    size_t vocab_size_ = 0;
    Fetched logits_;
    Fetched sampled_;
    Fetched top_ids_;
    Fetched top_logprobs_;
    uint64_t bytes_ = 0;
};

}  // namespace castiron::cuda
