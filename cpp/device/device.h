// What the batching runtime asks of a device. One implementation per kind: host/ and cuda/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>

#include "device/adapter.h"
#include "program/program.h"

namespace castiron {

inline constexpr int kBlockTokens = 32;  // tokens in a KV block

// Layers of the KV cache whose blocks lie in one pool.
enum class KvGroup : uint8_t {
    kAll,     // all that are not in the other: blocks
    kWindow,  // layers with a window of attention, where others have none: window blocks
};

[[nodiscard]] inline KvGroup group_of(const KvLayer& layer) {
    return layer.window > 0 ? KvGroup::kWindow : KvGroup::kAll;
}

// What a device keeps apart for KvGroup::kWindow.
struct KvWindowGroup {
    int tokens = 0;            // the longest window of its layers; 0: there is no such group
    uint64_t block_bytes = 0;  // of a window block, over its layers
};

// One request's part of a step: rows [first_row, first_row + num_rows) of the packed tokens.
// Row i of it is the token at absolute position start_position + i; the cache already holds every
// earlier position. block_table[p / kBlockTokens] is the pool block of position p, and window_table's entry
// its window block, where such are kept apart; places before the window name any of the sequence's.
struct SequenceSlice {
    int first_row = 0;
    int num_rows = 0;
    int start_position = 0;
    std::span<const int32_t> block_table;
    const Adapter* adapter = nullptr;  // of this device; or null
    std::span<const int32_t> window_table{};
};

// A step: everything a device needs besides the program. All spans stay valid until the call that they are
// given to returns.
struct Batch {
    std::span<const int32_t> token_ids;        // [T]
    std::span<const int32_t> positions;        // [T]
    std::span<const int32_t> logit_rows;       // [N] rows of the packed tokens, ascending
    std::span<const SequenceSlice> sequences;  // in row order, covering all T rows
    // Empty, or [T]: the row of logits whose token, as the step started before chooses it, is the row's
    // token; -1 where token_ids has it.
    std::span<const int32_t> token_sources{};
};

// How the token of one row of logits is chosen on the device; the numbers mean what they mean in
// SamplingParams.
struct RowSampling {
    float temperature = 0;  // 0: greedy
    int32_t top_k = 0;
    float top_p = 1;
    float min_p = 0;
    float uniform = 0;          // the row's random number, in [0, 1)
    int32_t num_logprobs = -1;  // at most kMaxDeviceLogprobs
    float repetition = 1;
    float frequency = 0;
    float presence = 0;
};

// A logit that is changed before the choice; at most one entry for each row and token.
struct LogitEdit {
    int32_t row = 0;  // of the logits
    int32_t token = 0;
    int32_t count = 0;  // -1: never chosen; else penalised as a token that the output has so many times
};

inline constexpr int kMaxDeviceLogprobs = 20;
inline constexpr int kMaxLogitEdits = 65536;  // in a step

struct SamplingBatch {
    std::span<const RowSampling> rows;  // [N]
    std::span<const LogitEdit> edits;   // at most kMaxLogitEdits
};

// What was chosen, valid until the next step; of steps that are started, until the second start() after its
// own.
struct SampledRows {
    struct Row {
        int32_t token = -1;
        int32_t status = 0;  // SampleStatus of sampling/sampler.h
    };
    std::span<const Row> rows;  // [N]
    // [N, kMaxDeviceLogprobs], likeliest first, -1 where there is none; empty when no row wants any.
    std::span<const int32_t> top_ids;
    // [N, 1 + kMaxDeviceLogprobs]: the chosen token's, then those of top_ids.
    std::span<const float> top_logprobs;
};

// The device is beyond use: every further call would fail.
struct DeviceLostError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Memory that a KV pool may take, in bytes.
struct KvBudget {
    uint64_t available = 0;
    uint64_t by_default = 0;  // when nobody says how much
};

class Device {
public:
    virtual ~Device() = default;

    // Bytes that one KV block takes over all layers but those of kv_window_group(), for the pool's size.
    [[nodiscard]] virtual uint64_t kv_block_bytes() const = 0;
    // Keys and values that lie so many tokens or more before a token are not read for it, in any layer; 0:
    // all may be. A block table's places before that name blocks of the sequence that lie within.
    [[nodiscard]] virtual int kv_window() const { return 0; }
    // Layers that can be kept apart (KvLayer::window).
    [[nodiscard]] virtual KvWindowGroup kv_window_group() const { return {}; }
    // By default host memory: all that is available, a quarter if nobody says.
    [[nodiscard]] virtual KvBudget kv_budget() const;
    // Reserve the KV pools. Called once, before the first forward(). window_blocks: 0 where nothing is to be
    // kept apart, and block tables serve all layers.
    virtual void reserve_kv(int num_blocks, int window_blocks) = 0;
    // Run the program. Returns logits [N, vocab_size], row-major, valid until the next step.
    [[nodiscard]] virtual std::span<const float> forward(const Batch& batch) = 0;
    // Whether forward_and_sample() can be called.
    [[nodiscard]] virtual bool samples() const { return false; }
    // Run the program and choose a token for each row of logits, which stay on the device.
    [[nodiscard]] virtual SampledRows forward_and_sample(const Batch& batch, const SamplingBatch& sampling);
    // Whether start() and finish() can be called.
    [[nodiscard]] virtual bool queues() const { return false; }
    // Begins what forward_and_sample() does and returns. One more step may be started while one is under way:
    // it runs behind it, as do copies of KV blocks. After an exception of any call no step is under way.
    virtual void start(const Batch& batch, const SamplingBatch& sampling);
    // Waits for the first of the steps under way.
    [[nodiscard]] virtual SampledRows finish();
    // Sequences that the graph replayed by the last step was captured for; 0: its kernels were launched one
    // by one.
    [[nodiscard]] virtual int graph_bucket() const { return 0; }
    // Makes a LoRA adapter ready to run. On any thread, also while a step runs. Throws std::invalid_argument
    // where it does not fit the program, and where the device takes no adapters.
    [[nodiscard]] virtual std::shared_ptr<const Adapter> make_adapter(const LoraModules& modules) const;
    // Copy the contents of one block of a group to another (prefix reuse of a partly filled block).
    virtual void copy_kv_block(KvGroup group, int from, int to) = 0;
    // Memory of this machine that blocks can be copied to, the device's until it is gone. Called once at
    // most.
    [[nodiscard]] virtual std::byte* reserve_host_blocks(uint64_t bytes);
    // Copy a block of a group to that memory, as many bytes as it has, or back. In the order of steps and
    // other copies: it is done when a step that was started later is, and until then the memory must stay as
    // it is.
    virtual void save_kv_block(KvGroup group, int block, std::byte* to);
    virtual void load_kv_block(KvGroup group, const std::byte* from, int block);
};

struct HostOptions {
    int num_threads = 0;     // 0: all cores this process may run on
    bool huge_pages = true;  // ask for 2 MiB pages for weights, arena and KV
    std::string isa;         // "": the best of this CPU; "avx2", "avx512", ... force one (tests)
    int max_lora_rank = 0;   // of adapters; 0: takes none
};

// Throws std::invalid_argument with a message for the user when the program is not valid for this device
// (unknown kernel, wrong operand shapes, values outside the arena, weights too small).
// Weights are copied into the device's own memory: Weight::data need not outlive this call.
[[nodiscard]] std::unique_ptr<Device> make_host_device(std::shared_ptr<const Program> program,
                                                       const HostOptions& options);

}  // namespace castiron
