#include "bindings/launches_from_dict.h"

#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

namespace castiron::bindings {
namespace {

constexpr int64_t kMaxCount = int64_t{1} << 31;
constexpr int64_t kMaxSlotBytes = int64_t{1} << 40;
constexpr size_t kMaxParams = 64;
constexpr size_t kMaxGridDims = 3;

constexpr std::array<std::pair<const char*, StepInput>, 29> kStepInputs{{
    {"token_ids", StepInput::kTokenIds},
    {"positions", StepInput::kPositions},
    {"logit_rows", StepInput::kLogitRows},
    {"slots", StepInput::kSlots},
    {"query_start", StepInput::kQueryStart},
    {"kv_len", StepInput::kKvLen},
    {"block_table", StepInput::kBlockTable},
    {"decode_seq", StepInput::kDecodeSeq},
    {"tile_seq", StepInput::kTileSeq},
    {"tile_row", StepInput::kTileRow},
    {"window_slots", StepInput::kWindowSlots},
    {"window_table", StepInput::kWindowTable},
    {"lora_rows", StepInput::kLoraRows},
    {"lora_slots", StepInput::kLoraSlots},
    {"logit_lora_rows", StepInput::kLogitLoraRows},
    {"logit_lora_slots", StepInput::kLogitLoraSlots},
    {"token_source", StepInput::kTokenSource},
    {"temperature", StepInput::kTemperature},
    {"top_k", StepInput::kTopK},
    {"top_p", StepInput::kTopP},
    {"min_p", StepInput::kMinP},
    {"uniform", StepInput::kUniform},
    {"num_logprobs", StepInput::kNumLogprobs},
    {"repetition", StepInput::kRepetition},
    {"frequency", StepInput::kFrequency},
    {"presence", StepInput::kPresence},
    {"edit_row", StepInput::kEditRow},
    {"edit_token", StepInput::kEditToken},
    {"edit_count", StepInput::kEditCount},
}};

int64_t integer_or(Fields& fields, const char* key, int64_t absent, int64_t min, int64_t max) {
    const nb::object value = fields.optional(key);
    return value.is_valid() ? as_integer(value, fields.path(key), min, max) : absent;
}

std::string text_or_empty(Fields& fields, const char* key) {
    const nb::object value = fields.optional(key);
    return value.is_valid() ? as_string(value, fields.path(key)) : std::string();
}

// The bytes of the entry that field `key` names; empty where it names none.
std::string image_from(Fields& fields, const char* key, nb::handle images) {
    const std::string entry = text_or_empty(fields, key);
    if (entry.empty()) return {};
    const std::string path = "kernel_images[\"" + entry + "\"]";
    const nb::str name(entry.c_str(), entry.size());
    if (images.is_none() || !as_dict(images, "kernel_images").contains(name)) {
        throw std::invalid_argument(path + " is missing; " + fields.path(key) + " names it");
    }
    const nb::object image = as_dict(images, "kernel_images")[name];
    if (!PyBytes_Check(image.ptr()) || PyBytes_GET_SIZE(image.ptr()) == 0) {
        bad_value(path, image, "bytes, at least one");
    }
    return {PyBytes_AS_STRING(image.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(image.ptr()))};
}

Kernel::Param param_from(nb::handle value, const std::string& path) {
    const std::string name = as_string(value, path);
    if (name == "ptr") return Kernel::Param::kPtr;
    if (name == "i32") return Kernel::Param::kI32;
    if (name == "i64") return Kernel::Param::kI64;
    if (name == "f32") return Kernel::Param::kF32;
    bad_value(path, value, "'ptr', 'i32', 'i64' or 'f32'");
}

StepInput step_input_from(nb::handle value, const std::string& path) {
    const std::string name = as_string(value, path);
    for (const auto& [known, input] : kStepInputs) {
        if (name == known) return input;
    }
    bad_value(path, value, "an array of the step's input block (docs/cuda-program.md)");
}

GridDim grid_dim_from(nb::handle item, const std::string& path) {
    Fields fields(item, path);
    GridDim dim;
    if (const nb::object of = fields.optional("of"); of.is_valid() && !of.is_none()) {
        dim.of = symbol_from(of, fields.path("of"));
    }
    dim.per = integer_or(fields, "per", 1, 1, kMaxCount);
    dim.times = integer_or(fields, "times", 1, 1, kMaxCount);
    dim.per_sm = static_cast<int>(integer_or(fields, "per_sm", 0, 0, 64));
    fields.finish({"of", "per", "times", "per_sm"});
    return dim;
}

Arg arg_from(nb::handle item, const std::string& path, const Program& program, const Index& values,
             const Index& weights) {
    Fields fields(item, path);
    Arg arg;
    int set = 0;
    // Model dumps name every field; those that are not meant hold None.
    const auto given = [&](const char* key, Arg::Kind kind, auto read) {
        const nb::object value = fields.optional(key);
        if (!value.is_valid() || value.is_none()) return;
        ++set;
        arg.kind = kind;
        read(value, fields.path(key));
    };
    const auto number = [&](int64_t min, int64_t max) {
        return [&arg, min, max](nb::handle value, const std::string& at) {
            arg.index = as_integer(value, at, min, max);
        };
    };
    const auto last_layer = static_cast<int64_t>(program.kv_layers.size()) - 1;
    given("value", Arg::Kind::kValue,
          [&](nb::handle value, const std::string& at) { arg.index = look_up(values, value, at, "value"); });
    given("weight", Arg::Kind::kWeight, [&](nb::handle value, const std::string& at) {
        arg.index = look_up(weights, value, at, "weight");
    });
    given("adapter", Arg::Kind::kAdapter, number(0, kMaxSlotBytes));
    given("input", Arg::Kind::kInput, [&](nb::handle value, const std::string& at) {
        arg.index = static_cast<int64_t>(step_input_from(value, at));
    });
    given("k_cache", Arg::Kind::kKCache, number(0, last_layer));
    given("v_cache", Arg::Kind::kVCache, number(0, last_layer));
    given("size", Arg::Kind::kSize,
          [&](nb::handle value, const std::string& at) { arg.index = symbol_from(value, at); });
    given("i32", Arg::Kind::kI32,
          number(std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
    given("i64", Arg::Kind::kI64, number(std::numeric_limits<int64_t>::min(), INT64_MAX));
    given("f32", Arg::Kind::kF32, [&](nb::handle value, const std::string& at) {
        const double read = PyFloat_Check(value.ptr()) ? PyFloat_AS_DOUBLE(value.ptr()) : NAN;
        arg.number = static_cast<float>(read);
        if (!std::isfinite(arg.number)) bad_value(at, value, "a finite number of single precision");
    });
    fields.finish({"value", "weight", "adapter", "input", "k_cache", "v_cache", "size", "i32", "i64", "f32"});
    if (set != 1) {
        throw std::invalid_argument(path + " sets " + std::to_string(set) +
                                    " fields; exactly one says what the argument is");
    }
    return arg;
}

When when_from(nb::handle item, const std::string& path) {
    Fields fields(item, path);
    When when;
    when.of = symbol_from(fields.required("of"), fields.path("of"));
    when.low = as_integer(fields.required("low"), fields.path("low"), 0, kMaxCount);
    when.high = as_integer(fields.required("high"), fields.path("high"), 0, kMaxCount);
    fields.finish({"of", "low", "high"});
    return when;
}

}  // namespace

int look_up(const Index& index, nb::handle value, const std::string& path, const char* kind) {
    const auto found = index.find(as_string(value, path));
    if (found == index.end()) bad_value(path, value, std::string("the name of a ") + kind);
    return found->second;
}

int64_t symbol_from(nb::handle value, const std::string& path) {
    const std::string name = as_string(value, path);
    if (name == "T") return Dim::kTokens;
    if (name == "N") return Dim::kRows;
    if (name == "S") return Dim::kSequences;
    if (name == "D") return Dim::kDecodes;
    if (name == "P") return Dim::kTiles;
    if (name == "R") return Dim::kRandom;
    if (name == "E") return Dim::kEdits;
    if (name == "L") return Dim::kLogprobs;
    if (name == "V") return Dim::kVocabLimit;
    if (name == "A") return Dim::kLoraTiles;
    if (name == "B") return Dim::kLogitLoraTiles;
    bad_value(path, value, "one of the symbols T, N, S, D, P, R, E, L, V, A and B");
}

void read_kernels(nb::handle list, const std::string& path, nb::handle images, Program& program) {
    for_each(list, path, [&](nb::handle item, const std::string& item_path) {
        Fields fields(item, item_path);
        Kernel kernel;
        kernel.name = as_string(fields.required("name"), fields.path("name"));
        kernel.function = as_string(fields.required("function"), fields.path("function"));
        kernel.image = image_from(fields, "image", images);
        kernel.ptx = image_from(fields, "ptx", images);
        if (kernel.image.empty() && kernel.ptx.empty()) {
            throw std::invalid_argument(item_path + " (\"" + kernel.name +
                                        "\") names neither an image nor PTX; one of them is needed");
        }
        kernel.threads =
            static_cast<int>(as_integer(fields.required("threads"), fields.path("threads"), 1, 1024));
        kernel.shared_bytes = static_cast<int>(integer_or(fields, "shared_bytes", 0, 0, 1 << 20));
        kernel.hidden_pointers = static_cast<int>(integer_or(fields, "hidden_pointers", 0, 0, 8));
        kernel.scratch_bytes = integer_or(fields, "scratch_bytes", 0, 0, 1 << 20);
        for_each(
            fields.required("params"), fields.path("params"),
            [&](nb::handle param, const std::string& at) { kernel.params.push_back(param_from(param, at)); });
        if (kernel.params.size() > kMaxParams) {
            bad_value(fields.path("params"), fields.required("params"), "at most 64 parameters");
        }
        // For people: where the kernel comes from. Read, so that the types are checked, and dropped.
        static_cast<void>(text_or_empty(fields, "source"));
        if (const nb::object types = fields.optional("types"); types.is_valid()) {
            static_cast<void>(as_sequence(types, fields.path("types")));
        }
        for (const char* key : {"constants", "resources"}) {
            if (const nb::object facts = fields.optional(key); facts.is_valid()) {
                static_cast<void>(as_dict(facts, fields.path(key)));
            }
        }
        fields.finish({"name", "function", "image", "ptx", "threads", "shared_bytes", "params",
                       "hidden_pointers", "scratch_bytes", "source", "types", "constants", "resources"});
        program.kernels.push_back(std::move(kernel));
    });
}

void read_launches(nb::handle list, const std::string& path, const Program& program, const Index& values,
                   const Index& weights, std::vector<Launch>& launches) {
    for_each(list, path, [&](nb::handle item, const std::string& item_path) {
        Fields fields(item, item_path);
        Launch launch;
        const auto last_kernel = static_cast<int64_t>(program.kernels.size()) - 1;
        launch.kernel =
            static_cast<int>(as_integer(fields.required("kernel"), fields.path("kernel"), 0, last_kernel));
        const nb::object grid = fields.required("grid");
        for_each(grid, fields.path("grid"), [&](nb::handle dim, const std::string& at) {
            launch.grid.push_back(grid_dim_from(dim, at));
        });
        if (launch.grid.empty() || launch.grid.size() > kMaxGridDims) {
            bad_value(fields.path("grid"), grid, "1 to 3 dimensions");
        }
        for_each(fields.required("args"), fields.path("args"), [&](nb::handle arg, const std::string& at) {
            launch.args.push_back(arg_from(arg, at, program, values, weights));
        });
        if (const nb::object when = fields.optional("when"); when.is_valid() && !when.is_none()) {
            launch.when = when_from(when, fields.path("when"));
        }
        fields.finish({"kernel", "grid", "args", "when"});
        launches.push_back(std::move(launch));
    });
}

}  // namespace castiron::bindings
