// The program as structs: the C++ twin of engines/program.py. Filled by the bindings from a checked
// program.json, or by hand in tests. docs/program.md says what each kernel means.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace castiron {

enum class DType : uint8_t { kF32, kI32, kBF16 };
enum class Layout : uint8_t { kPlain, kPanel16, kPanel16x2 };

// A size: a number, or one of the two symbols that a step binds.
struct Dim {
    static constexpr int64_t kTokens = -1;  // "T": tokens in this step
    static constexpr int64_t kRows = -2;    // "N": rows whose logits are wanted
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

struct Step {
    std::string kernel;
    std::vector<int> inputs;   // indices into Program::values
    std::vector<int> weights;  // indices into Program::weights
    std::vector<int> outputs;
    std::map<std::string, Attr> attrs;
};

struct KvLayer {
    int kv_heads = 0;
    int head_dim = 0;
    int v_head_dim = 0;
    DType dtype = DType::kF32;
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
    std::vector<KvLayer> kv_layers;
};

}  // namespace castiron
