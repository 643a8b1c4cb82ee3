#include "device/cuda/step_results.h"

#include "device/cuda/layout.h"

namespace castiron::cuda {
namespace {

constexpr uint64_t kItemBytes = 4;  // all of them are f32 or i32

template <typename T>
std::span<const T> rows_of(const PinnedBuffer& buffer, size_t count) {
    return {static_cast<const T*>(buffer.get()), count};
}

}  // namespace

StepResults::StepResults(const Driver& driver, const Program& program, const std::vector<Address>& values,
                         size_t slots)
    : vocab_size_(static_cast<size_t>(program.vocab_size)) {
    logits_ = make(driver, program, values, "logits", DType::kF32, program.vocab_size, 1);
    if (program.sampling.empty()) return;
    sampled_ = make(driver, program, values, "sampled", DType::kI32, 2, slots);
    top_ids_ = make(driver, program, values, "sample_top_ids", DType::kI32, kMaxDeviceLogprobs, slots);
    top_logprobs_ =
        make(driver, program, values, "sample_top_logprobs", DType::kF32, 1 + kMaxDeviceLogprobs, slots);
}

StepResults::Fetched StepResults::make(const Driver& driver, const Program& program,
                                       const std::vector<Address>& values, const char* name, DType dtype,
                                       int64_t columns, size_t slots) {
    const int value = find_value(program, name, dtype, {Dim{Dim::kRows}, Dim{columns}}, true);
    Fetched made;
    made.address = values[static_cast<size_t>(value)];
    made.row_bytes = static_cast<uint64_t>(columns) * kItemBytes;
    const uint64_t bytes = made.row_bytes * static_cast<uint64_t>(program.limits.max_logit_rows);
    for (size_t slot = 0; slot < slots; ++slot) made.hosts[slot] = make_pinned_buffer(driver, bytes);
    bytes_ += bytes * slots;
    return made;
}

void StepResults::fetch_logits(const Driver& driver, int64_t rows, StreamHandle stream) const {
    fetch(driver, logits_, rows, 0, stream);
}

void StepResults::fetch_sampled(const Driver& driver, int64_t rows, bool logprobs, size_t slot,
                                StreamHandle stream) const {
    fetch(driver, sampled_, rows, slot, stream);
    if (!logprobs) return;
    fetch(driver, top_ids_, rows, slot, stream);
    fetch(driver, top_logprobs_, rows, slot, stream);
}

std::span<const float> StepResults::logits(size_t rows) const {
    return rows_of<float>(logits_.hosts[0], rows * vocab_size_);
}

SampledRows StepResults::sampled(size_t rows, bool logprobs, size_t slot) const {
    SampledRows sampled{rows_of<SampledRows::Row>(sampled_.hosts[slot], rows), {}, {}};
    if (!logprobs) return sampled;
    sampled.top_ids = rows_of<int32_t>(top_ids_.hosts[slot], rows * kMaxDeviceLogprobs);
    sampled.top_logprobs = rows_of<float>(top_logprobs_.hosts[slot], rows * (1 + kMaxDeviceLogprobs));
    return sampled;
}

void StepResults::fetch(const Driver& driver, const Fetched& result, int64_t rows, size_t slot,
                        StreamHandle stream) {
    if (rows == 0) return;
    check(driver,
          driver.copy_to_host(result.hosts[slot].get(), result.address,
                              result.row_bytes * static_cast<uint64_t>(rows), stream),
          "copying a step's results to the host");
}

}  // namespace castiron::cuda
