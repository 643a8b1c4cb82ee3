// The program as structs: the C++ twin of engines/program.py. Filled by the bindings from a checked
// program.json, or by hand in tests. docs/program.md says what each kernel means.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace castiron {

// kI4 and kF4E2M1 are codes of four bits, two in a byte, and of weights alone.
enum class DType : uint8_t { kF32, kI32, kBF16, kF16, kI8, kU8, kF8E4M3, kI4, kF4E2M1 };
enum class Layout : uint8_t { kPlain, kWords, kPanel16, kPanel16x2, kPanel16x4, kPanel16x4n };

// A size: a number, or one of the symbols that a step binds. Host programs know T and N alone.
struct Dim {
    static constexpr int64_t kTokens = -1;     // "T": tokens in this step
    static constexpr int64_t kRows = -2;       // "N": rows whose logits are wanted
    static constexpr int64_t kSequences = -3;  // "S"
    static constexpr int64_t kDecodes = -4;    // "D": sequences with one row
    static constexpr int64_t kTiles = -5;      // "P": query tiles of the other sequences
    // Of Program::sampling alone:
    static constexpr int64_t kRandom = -6;      // "R": rows drawn at random
    static constexpr int64_t kEdits = -7;       // "E": logits that are changed before sampling
    static constexpr int64_t kLogprobs = -8;    // "L": rows that want log-probabilities
    static constexpr int64_t kVocabLimit = -9;  // "V": token ids from it on are never drawn
    // Of Step::adapted alone: tiles of rows that have one adapter.
    static constexpr int64_t kLoraTiles = -10;       // "A"
    static constexpr int64_t kLogitLoraTiles = -11;  // "B": of rows whose logits are wanted
    int64_t value = 0;

    [[nodiscard]] bool symbolic() const { return value < 0; }
    [[nodiscard]] int64_t bind(int64_t tokens, int64_t rows) const {
        return value == kTokens ? tokens : value == kRows ? rows : value;
    }
    bool operator==(const Dim&) const = default;
};

struct Value {
    std::string name;
    DType dtype = DType::kF32;
    std::vector<Dim> shape;
    uint64_t offset = 0;  // bytes from the arena's start; unused by views
    int base = -1;        // index of the value this is a view on, or -1
    uint64_t column = 0;  // elements into each row of the base
};

struct Weight {
    std::string name;
    DType dtype = DType::kF32;
    Layout layout = Layout::kPlain;
    std::vector<int64_t> shape;  // logical: [N, K] for matrices
    const std::byte* data = nullptr;
    size_t bytes = 0;
};

using Attr = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;

// What follows up to Kernel is of CUDA programs alone: docs/cuda-program.md.

// times * ceil(of / per) blocks, at most per_sm for each multiprocessor (0: no bound).
struct GridDim {
    int64_t of = 0;  // Dim::kTokens ... kTiles; 0: absent, counts as 1
    int64_t per = 1;
    int64_t times = 1;
    int per_sm = 0;
};

// An array of the step's input block.
enum class StepInput : uint8_t {
    kTokenIds,
    kPositions,
    kLogitRows,
    kSlots,
    kQueryStart,
    kKvLen,
    kBlockTable,
    kDecodeSeq,
    kTileSeq,
    kTileRow,
    kWindowSlots,  // of programs with KvLayer::window alone
    kWindowTable,
    kLoraRows,  // of Step::adapted alone
    kLoraSlots,
    kLogitLoraRows,
    kLogitLoraSlots,
    kTokenSource,  // of Program::sampling and feeding alone, from here on
    kTemperature,
    kTopK,
    kTopP,
    kMinP,
    kUniform,
    kNumLogprobs,
    kRepetition,
    kFrequency,
    kPresence,
    kEditRow,
    kEditToken,
    kEditCount,
};

struct Arg {
    enum class Kind : uint8_t {
        kValue,
        kWeight,
        kAdapter,
        kInput,
        kKCache,
        kVCache,
        kSize,
        kI32,
        kI64,
        kF32
    };
    Kind kind = Kind::kI32;
    // Of the value, weight, StepInput or layer; a byte of the first adapter slot; a symbol of Dim; or the
    // integer itself.
    int64_t index = 0;
    float number = 0;  // kF32
};

struct When {
    int64_t of = 0;  // a symbol of Dim; 0: always
    int64_t low = 0;
    int64_t high = 0;
};

struct Launch {
    int kernel = 0;  // index into Program::kernels
    std::vector<GridDim> grid;
    std::vector<Arg> args;
    When when;
};

struct Kernel {
    enum class Param : uint8_t { kPtr, kI32, kI64, kF32 };
    std::string name;
    std::string function;
    std::string image;  // the cubin itself, or empty
    std::string ptx;    // the text itself, or empty
    int threads = 0;
    int shared_bytes = 0;
    std::vector<Param> params;
    int hidden_pointers = 0;
    int64_t scratch_bytes = 0;  // device memory for each block, behind the first hidden pointer
};

// Columns [column, column + count) of a product are outputs [row, row + count) of a module of the source
// model. A gated product has the columns of gate, then those of up.
struct ModuleColumns {
    std::string module;
    int64_t column = 0;
    int64_t row = 0;
    int64_t count = 0;
};

// Where the adapters of a product lie in a slot: byte offsets of a [modules · rank, inputs] and b [columns,
// rank].
struct AdapterPlace {
    int64_t inputs = 0;
    uint64_t a = 0;
    uint64_t b = 0;
};

struct Step {
    std::string kernel;
    std::vector<int> inputs;   // indices into Program::values
    std::vector<int> weights;  // indices into Program::weights
    std::vector<int> outputs;
    std::map<std::string, Attr> attrs;
    std::vector<Launch> launches{};
    std::vector<ModuleColumns> modules{};  // in order; of products, what adapters can add to
    // On CUDA: what stands in the place of launches in a step in which rows have adapters, where they lie.
    std::vector<Launch> adapted{};
    std::optional<AdapterPlace> adapter{};
};

// Of a CUDA program: memory for adapters of at most `rank`, a multiple of 16, in slots. rank 0: it takes
// none.
struct AdapterSlots {
    int rank = 0;
    DType dtype = DType::kBF16;  // or f16
    uint64_t slot_bytes = 0;
};

struct KvLayer {
    int kv_heads = 0;
    int head_dim = 0;
    int v_head_dim = 0;
    DType dtype = DType::kF32;
    // One for each KV head, or none: a stored number is the value divided by its head's scale.
    std::vector<float> k_scale{};
    std::vector<float> v_scale{};
    // Tokens that a query sees in this layer at most, itself among them, of a model of which other layers see
    // more: it has blocks of its own then, window blocks. 0: its blocks are those of all others.
    int window = 0;
};

struct Limits {
    int max_batch_size = 0;
    int max_num_tokens = 0;
    int max_logit_rows = 0;
    int max_seq_len = 0;
};

struct Program {
    std::string target;
    int vocab_size = 0;
    Limits limits;
    uint64_t arena_bytes = 0;
    std::vector<Value> values;
    std::vector<Weight> weights;
    std::vector<Step> steps;
    std::vector<Step> sampling;  // run after the steps when tokens are chosen on the device
    std::vector<Step> feeding;   // run before them when tokens come from what the step before chose
    std::vector<KvLayer> kv_layers;
    std::vector<Kernel> kernels;
    int prefill_tile = 0;
    AdapterSlots adapters;
};

}  // namespace castiron
