// What the batching runtime asks of a device. One implementation per target: host/, later cuda/.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "program/program.h"

namespace castiron {

inline constexpr int kBlockTokens = 32;  // tokens in a KV block

// One request's part of a step: rows [first_row, first_row + num_rows) of the packed tokens.
// Row i of it is the token at absolute position start_position + i; the cache already holds every
// earlier position. block_table[p / kBlockTokens] is the pool block of position p.
struct SequenceSlice {
    int first_row = 0;
    int num_rows = 0;
    int start_position = 0;
    std::span<const int32_t> block_table;
};

// A step: everything a device needs besides the program. All spans stay valid until forward() returns.
struct Batch {
    std::span<const int32_t> token_ids;        // [T]
    std::span<const int32_t> positions;        // [T]
    std::span<const int32_t> logit_rows;       // [N] rows of the packed tokens, ascending
    std::span<const SequenceSlice> sequences;  // in row order, covering all T rows
};

class Device {
public:
    virtual ~Device() = default;

    // Bytes that one KV block takes over all layers, for the pool's size.
    [[nodiscard]] virtual uint64_t kv_block_bytes() const = 0;
    // Reserve the KV pool. Called once, before the first forward().
    virtual void reserve_kv(int num_blocks) = 0;
    // Run the program. Returns logits [N, vocab_size], row-major, valid until the next forward().
    [[nodiscard]] virtual std::span<const float> forward(const Batch& batch) = 0;
    // Copy the contents of one block to another (prefix reuse of a partly filled block).
    virtual void copy_kv_block(int from, int to) = 0;
};

struct HostOptions {
    int num_threads = 0;     // 0: all cores this process may run on
    bool huge_pages = true;  // ask for 2 MiB pages for weights, arena and KV
    std::string isa;         // "": the best of this CPU; "avx2" or "avx512" force one (tests)
};

// Throws std::invalid_argument with a message for the user when the program is not valid for this device
// (unknown kernel, wrong operand shapes, values outside the arena, weights too small).
// Weights are copied into the device's own memory: Weight::data need not outlive this call.
[[nodiscard]] std::unique_ptr<Device> make_host_device(std::shared_ptr<const Program> program,
                                                       const HostOptions& options);

}  // namespace castiron
