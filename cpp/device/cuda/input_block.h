// A step as the kernels see it: the arrays of docs/cuda-program.md, "Step inputs", in one block of memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/cuda/counts.h"
#include "device/cuda/lora_rows.h"
#include "device/device.h"

namespace castiron::cuda {

inline constexpr size_t kNumInputs = 29;

// Byte offsets of the arrays, by StepInput.
struct InputLayout {
    std::array<uint64_t, kNumInputs> offsets{};
    uint64_t bytes = 0;
};

class InputPacker {
public:
    // vocab_limit: what symbol V stands for. max_loras: different adapters of a step at most. Throws
    // std::invalid_argument for a program without query tiles.
    InputPacker(const Program& program, int vocab_limit, int max_loras = 0);

    // Counts of the batch, without padding; those of sampling are 0 without it.
    [[nodiscard]] Counts count(const Batch& batch, const SamplingBatch* sampling, const LoraRows& lora) const;
    // Counts of a step that decodes one row of each of `sequences` sequences, all of them drawn at random or
    // none, with as many adapters as may be or with none.
    [[nodiscard]] Counts decode_counts(int sequences, bool random, bool adapted) const;
    // Arrays of sampling come last, the edits behind all others: without edits a block is the beginning of
    // the same block with edits.
    [[nodiscard]] InputLayout layout(const Counts& counts) const;
    // Bytes of the largest block.
    [[nodiscard]] uint64_t max_bytes() const { return max_bytes_; }

    // Writes the batch into a block of layout(counts), padded where counts are larger than the batch's own.
    // Without sampling its arrays are padding.
    void pack(const Batch& batch, const SamplingBatch* sampling, const LoraRows& lora, const Counts& counts,
              std::byte* block) const;

private:
    void pack_sequences(const Batch& batch, const Counts& counts, const InputLayout& places,
                        std::byte* block) const;
    template <typename TableOf>
    void pack_tables(const Batch& batch, const Counts& counts, const InputLayout& places, std::byte* block,
                     StepInput slots_input, StepInput table_input, TableOf table_of) const;
    void pack_sampling(const SamplingBatch* sampling, const Counts& counts, const InputLayout& places,
                       std::byte* block) const;

    int prefill_tile_;
    int vocab_limit_;
    int max_loras_;
    bool has_sampling_;
    bool has_feeding_;
    bool has_windows_;     // layers with blocks of their own
    int64_t table_width_;  // block numbers of a sequence
    uint64_t max_bytes_ = 0;
};

}  // namespace castiron::cuda
