#include "bindings/program_from_dict.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/launches_from_dict.h"
#include "bindings/python_value.h"

namespace castiron::bindings {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 40;
constexpr int64_t kMaxCount = int64_t{1} << 48;
constexpr int64_t kMaxProducts = int64_t{1} << 50;  // elements of one tensor
constexpr size_t kMaxRank = 6;

using DTypeNames = std::initializer_list<std::pair<const char*, DType>>;

DType dtype_from(nb::handle value, const std::string& path, DTypeNames names) {
    const std::string given = as_string(value, path);
    std::string expected;
    for (const auto& [name, dtype] : names) {
        if (given == name) return dtype;
        expected += std::string(expected.empty() ? "'" : ", '") + name + "'";
    }
    bad_value(path, value, ("one of " + expected).c_str());
}

DType value_dtype_from(nb::handle value, const std::string& path) {
    return dtype_from(value, path,
                      {{"f32", DType::kF32},
                       {"i32", DType::kI32},
                       {"bf16", DType::kBF16},
                       {"f16", DType::kF16},
                       {"i8", DType::kI8},
                       {"u8", DType::kU8},
                       {"f8e4m3", DType::kF8E4M3}});
}

DType weight_dtype_from(nb::handle value, const std::string& path) {
    return dtype_from(value, path,
                      {{"f32", DType::kF32},
                       {"i32", DType::kI32},
                       {"bf16", DType::kBF16},
                       {"f16", DType::kF16},
                       {"i8", DType::kI8},
                       {"u8", DType::kU8},
                       {"f8e4m3", DType::kF8E4M3},
                       {"i4", DType::kI4},
                       {"f4e2m1", DType::kF4E2M1}});
}

DType cache_dtype_from(nb::handle value, const std::string& path) {
    return dtype_from(value, path,
                      {{"f32", DType::kF32},
                       {"bf16", DType::kBF16},
                       {"f16", DType::kF16},
                       {"i8", DType::kI8},
                       {"f8e4m3", DType::kF8E4M3}});
}

Layout layout_from(nb::handle value, const std::string& path) {
    const std::string name = as_string(value, path);
    if (name == "plain") return Layout::kPlain;
    if (name == "words") return Layout::kWords;
    if (name == "panel16") return Layout::kPanel16;
    if (name == "panel16x2") return Layout::kPanel16x2;
    if (name == "panel16x4") return Layout::kPanel16x4;
    if (name == "panel16x4n") return Layout::kPanel16x4n;
    bad_value(path, value, "'plain', 'words', 'panel16', 'panel16x2', 'panel16x4' or 'panel16x4n'");
}

// What each layout of panels may hold (docs/program.md).
bool layout_holds(Layout layout, DType dtype) {
    switch (layout) {
        case Layout::kPlain:
            return true;
        case Layout::kPanel16:
            return dtype == DType::kF32 || dtype == DType::kF16;
        case Layout::kPanel16x2:
            return dtype == DType::kBF16;
        case Layout::kPanel16x4:
            return dtype == DType::kI8 || dtype == DType::kF8E4M3;
        case Layout::kWords:
        case Layout::kPanel16x4n:
            return dtype == DType::kI4 || dtype == DType::kF4E2M1;
    }
    return false;
}

Dim dim_from(nb::handle value, const std::string& path) {
    if (PyUnicode_Check(value.ptr())) {
        return {symbol_from(value, path)};
    }
    return {as_integer(value, path, 1, kMaxDim)};
}

template <typename T, typename Convert>
std::vector<T> shape_from(nb::handle value, const std::string& path, Convert convert) {
    std::vector<T> shape;
    double product = 1;
    for_each(value, path, [&](nb::handle item, const std::string& item_path) {
        shape.push_back(convert(item, item_path));
        if constexpr (std::is_same_v<T, Dim>) {
            product *= static_cast<double>(shape.back().symbolic() ? 1 : shape.back().value);
        } else {
            product *= static_cast<double>(shape.back());
        }
    });
    if (shape.empty() || shape.size() > kMaxRank) bad_value(path, value, "1 to 6 sizes");
    if (product > static_cast<double>(kMaxProducts)) bad_value(path, value, "fewer than 2^50 elements");
    return shape;
}

void add_name(Index& index, const std::string& name, size_t position, const std::string& path) {
    if (name.empty()) throw std::invalid_argument(path + " is empty");
    if (!index.emplace(name, static_cast<int>(position)).second) {
        throw std::invalid_argument(path + ": the name \"" + name + "\" is used twice");
    }
}

Attr attr_from(nb::handle value, const std::string& path) {
    const auto as_double = [](nb::handle number, const std::string& number_path) {
        const double result = PyFloat_Check(number.ptr()) ? PyFloat_AS_DOUBLE(number.ptr()) : NAN;
        if (!std::isfinite(result)) bad_value(number_path, number, "a finite number");
        return result;
    };
    if (PyBool_Check(value.ptr())) return as_bool(value, path);
    if (is_integer(value)) return as_integer(value, path, std::numeric_limits<int64_t>::min());
    if (PyFloat_Check(value.ptr())) return as_double(value, path);
    if (PyUnicode_Check(value.ptr())) return as_string(value, path);
    if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) {
        bad_value(path, value, "a bool, int, float, str or a list of ints or floats");
    }
    std::vector<int64_t> integers;
    std::vector<double> numbers;
    for_each(value, path, [&](nb::handle item, const std::string& item_path) {
        if (is_integer(item)) {
            integers.push_back(as_integer(item, item_path, std::numeric_limits<int64_t>::min()));
        } else {
            numbers.push_back(as_double(item, item_path));
        }
    });
    if (numbers.empty()) return integers;
    if (!integers.empty()) bad_value(path, value, "a list of ints or a list of floats, not both");
    return numbers;
}

// Values may be named before they are listed, so names are collected first.
void read_values(nb::handle list, const std::string& path, Program& program, Index& index) {
    for_each(list, path, [&](nb::handle item, const std::string& item_path) {
        Fields fields(item, item_path);
        Value value;
        value.name = as_string(fields.required("name"), fields.path("name"));
        value.dtype = value_dtype_from(fields.required("dtype"), fields.path("dtype"));
        value.shape = shape_from<Dim>(fields.required("shape"), fields.path("shape"), dim_from);
        if (const nb::object offset = fields.optional("offset"); offset.is_valid()) {
            value.offset = static_cast<uint64_t>(as_integer(offset, fields.path("offset"), 0, kMaxCount));
        }
        if (const nb::object column = fields.optional("column"); column.is_valid()) {
            value.column = static_cast<uint64_t>(as_integer(column, fields.path("column"), 0, kMaxCount));
        }
        fields.finish({"name", "dtype", "shape", "offset", "base", "column"});
        add_name(index, value.name, program.values.size(), fields.path("name"));
        program.values.push_back(std::move(value));
    });
}

void read_bases(nb::handle list, const std::string& path, Program& program, const Index& index) {
    size_t position = 0;
    for_each(list, path, [&](nb::handle item, const std::string& item_path) {
        Value& value = program.values[position++];
        Fields fields(item, item_path);
        const nb::object base = fields.optional("base");
        if (!base.is_valid() || base.is_none()) return;
        value.base = look_up(index, base, fields.path("base"), "value");
    });
    for (size_t i = 0; i < program.values.size(); ++i) {
        const Value& value = program.values[i];
        if (value.base < 0) continue;
        const Value& base = program.values[static_cast<size_t>(value.base)];
        const bool fits = base.base < 0 && value.shape.size() == 2 && base.shape.size() == 2 &&
                          value.shape[0] == base.shape[0] && value.dtype == base.dtype &&
                          !value.shape[1].symbolic() && !base.shape[1].symbolic() &&
                          static_cast<int64_t>(value.column) + value.shape[1].value <= base.shape[1].value;
        if (!fits) {
            throw std::invalid_argument(path + "[" + std::to_string(i) + "] (\"" + value.name +
                                        "\") is not a view on columns of \"" + base.name +
                                        "\": both must be two-dimensional with the same rows and " +
                                        "dtype, the columns inside, and the base no view itself");
        }
    }
}

void read_weights(nb::handle list, const std::string& path, Program& program, Index& index) {
    for_each(list, path, [&](nb::handle item, const std::string& item_path) {
        Fields fields(item, item_path);
        Weight weight;
        weight.name = as_string(fields.required("name"), fields.path("name"));
        weight.dtype = weight_dtype_from(fields.required("dtype"), fields.path("dtype"));
        weight.layout = layout_from(fields.required("layout"), fields.path("layout"));
        weight.shape = shape_from<int64_t>(fields.required("shape"), fields.path("shape"),
                                           [](nb::handle size, const std::string& size_path) {
                                               return as_integer(size, size_path, 1, kMaxDim);
                                           });
        fields.finish({"name", "dtype", "layout", "shape"});
        if (!layout_holds(weight.layout, weight.dtype) ||
            (weight.layout != Layout::kPlain && weight.shape.size() != 2)) {
            throw std::invalid_argument(item_path + " (\"" + weight.name +
                                        "\"): panels and words hold matrices [N, K], panel16 of f32 or "
                                        "f16, panel16x2 of bf16, panel16x4 of i8 or f8e4m3, panel16x4n and "
                                        "words of i4 or f4e2m1");
        }
        add_name(index, weight.name, program.weights.size(), fields.path("name"));
        program.weights.push_back(std::move(weight));
    });
}

void read_modules(nb::handle list, const std::string& path, Step& step) {
    for_each(list, path, [&](nb::handle item, const std::string& item_path) {
        Fields fields(item, item_path);
        const auto number = [&](const char* key, int64_t min) {
            return as_integer(fields.required(key), fields.path(key), min, kMaxDim);
        };
        ModuleColumns columns;
        columns.module = as_string(fields.required("module"), fields.path("module"));
        columns.column = number("column", 0);
        columns.row = number("row", 0);
        columns.count = number("count", 1);
        fields.finish({"module", "column", "row", "count"});
        step.modules.push_back(std::move(columns));
    });
}

AdapterPlace adapter_place_from(nb::handle item, const std::string& path) {
    Fields fields(item, path);
    AdapterPlace place;
    place.inputs = as_integer(fields.required("inputs"), fields.path("inputs"), 1, 1 << 24);
    place.a = static_cast<uint64_t>(as_integer(fields.required("a"), fields.path("a"), 0, kMaxDim));
    place.b = static_cast<uint64_t>(as_integer(fields.required("b"), fields.path("b"), 0, kMaxDim));
    // What launches name is looked up there.
    if (const nb::object operands = fields.optional("operands"); operands.is_valid()) {
        static_cast<void>(as_sequence(operands, fields.path("operands")));
    }
    fields.finish({"inputs", "a", "b", "operands"});
    return place;
}

AdapterSlots adapter_slots_from(nb::handle item, const std::string& path) {
    Fields fields(item, path);
    AdapterSlots slots;
    slots.rank = static_cast<int>(as_integer(fields.required("rank"), fields.path("rank"), 1, 512));
    slots.dtype = weight_dtype_from(fields.required("dtype"), fields.path("dtype"));
    slots.slot_bytes = static_cast<uint64_t>(
        as_integer(fields.required("slot_bytes"), fields.path("slot_bytes"), 1, kMaxDim));
    fields.finish({"rank", "dtype", "slot_bytes"});
    return slots;
}

// The places of adapters lie in a slot: the device writes there what the host has packed.
void check_adapter_places(const Program& program) {
    const AdapterSlots& slots = program.adapters;
    for (size_t i = 0; i < program.steps.size(); ++i) {
        const Step& step = program.steps[i];
        if (!step.adapter.has_value()) continue;
        std::set<std::string_view> modules;
        int64_t columns = 0;
        for (const ModuleColumns& one : step.modules) {
            modules.insert(one.module);
            columns = std::max(columns, one.column + one.count);
        }
        const auto bytes = [&](int64_t rows, int64_t width) {
            return static_cast<uint64_t>(rows) * static_cast<uint64_t>(width) * sizeof(uint16_t);
        };
        const auto ranks = static_cast<int64_t>(modules.size()) * slots.rank;
        const AdapterPlace& place = *step.adapter;
        const uint64_t of_a = bytes(ranks, place.inputs), of_b = bytes(columns, slots.rank);
        if (of_a > slots.slot_bytes || place.a > slots.slot_bytes - of_a || of_b > slots.slot_bytes ||
            place.b > slots.slot_bytes - of_b || place.a % sizeof(uint16_t) != 0 ||
            place.b % sizeof(uint16_t) != 0) {
            throw std::invalid_argument("program.steps[" + std::to_string(i) +
                                        "].adapter lies outside of a slot of " +
                                        std::to_string(slots.slot_bytes) + " bytes");
        }
    }
}

void read_steps(nb::handle list, const std::string& path, const Program& program, const Index& values,
                const Index& weights, std::vector<Step>& steps) {
    for_each(list, path, [&](nb::handle item, const std::string& item_path) {
        Fields fields(item, item_path);
        Step step;
        step.kernel = as_string(fields.required("kernel"), fields.path("kernel"));
        const auto read_names = [&](const char* key, const Index& index, const char* kind,
                                    std::vector<int>& to) {
            const nb::object names = fields.optional(key);
            if (!names.is_valid()) return;
            for_each(names, fields.path(key), [&](nb::handle name, const std::string& name_path) {
                to.push_back(look_up(index, name, name_path, kind));
            });
        };
        read_names("inputs", values, "value", step.inputs);
        read_names("weights", weights, "weight", step.weights);
        read_names("outputs", values, "value", step.outputs);
        if (const nb::object attrs = fields.optional("attrs"); attrs.is_valid()) {
            const std::string attrs_path = fields.path("attrs");
            for (const auto [key, value] : as_dict(attrs, attrs_path)) {
                const std::string name = as_string(key, attrs_path + ": a key");
                step.attrs.emplace(name, attr_from(value, attrs_path + "." + name));
            }
        }
        if (const nb::object launches = fields.optional("launches"); launches.is_valid()) {
            read_launches(launches, fields.path("launches"), program, values, weights, step.launches);
        }
        if (const nb::object adapted = fields.optional("adapted"); adapted.is_valid()) {
            read_launches(adapted, fields.path("adapted"), program, values, weights, step.adapted);
        }
        if (const nb::object place = fields.optional("adapter"); place.is_valid() && !place.is_none()) {
            step.adapter = adapter_place_from(place, fields.path("adapter"));
        }
        if (const nb::object modules = fields.optional("modules"); modules.is_valid()) {
            read_modules(modules, fields.path("modules"), step);
        }
        fields.finish(
            {"kernel", "inputs", "weights", "outputs", "attrs", "launches", "modules", "adapted", "adapter"});
        steps.push_back(std::move(step));
    });
}

void read_kv_layers(nb::handle list, const std::string& path, Program& program) {
    for_each(list, path, [&](nb::handle item, const std::string& item_path) {
        Fields fields(item, item_path);
        const auto size = [&](const char* key) {
            return static_cast<int>(as_integer(fields.required(key), fields.path(key), 1, 4096));
        };
        KvLayer layer{size("kv_heads"), size("head_dim"), size("v_head_dim"),
                      cache_dtype_from(fields.required("dtype"), fields.path("dtype"))};
        const auto read_scales = [&](const char* key, std::vector<float>& to) {
            const nb::object scales = fields.optional(key);
            if (!scales.is_valid()) return;
            for_each(scales, fields.path(key), [&](nb::handle scale, const std::string& scale_path) {
                const double number =
                    PyFloat_Check(scale.ptr()) ? PyFloat_AS_DOUBLE(scale.ptr()) : static_cast<double>(NAN);
                if (!(number > 0) || !std::isfinite(number)) bad_value(scale_path, scale, "a positive float");
                to.push_back(static_cast<float>(number));
            });
            if (!to.empty() && to.size() != static_cast<size_t>(layer.kv_heads)) {
                bad_value(fields.path(key), scales, "one scale for each KV head, or none");
            }
        };
        read_scales("k_scale", layer.k_scale);
        read_scales("v_scale", layer.v_scale);
        if (const nb::object window = fields.optional("window"); window.is_valid())
            layer.window = static_cast<int>(as_integer(window, fields.path("window"), 0, 1 << 24));
        fields.finish({"kv_heads", "head_dim", "v_head_dim", "dtype", "k_scale", "v_scale", "window"});
        program.kv_layers.push_back(layer);
    });
}

Limits limits_from(nb::handle value, const std::string& path) {
    Fields fields(value, path);
    const auto limit = [&](const char* key, int64_t max) {
        return static_cast<int>(as_integer(fields.required(key), fields.path(key), 1, max));
    };
    const Limits limits{limit("max_batch_size", 65536), limit("max_num_tokens", 1 << 20),
                        limit("max_logit_rows", 1 << 20), limit("max_seq_len", 1 << 24)};
    fields.finish({"max_batch_size", "max_num_tokens", "max_logit_rows", "max_seq_len"});
    return limits;
}

}  // namespace

Program program_from_dict(nb::handle dict, nb::handle images) {
    constexpr int kFormatMajor = 1;
    Fields fields(dict, "program");
    const nb::object format = as_sequence(fields.required("format"), "program.format");
    if (nb::len(format) != 2 || as_integer(format[0], "program.format[0]", 0) != kFormatMajor) {
        bad_value("program.format", format, "format 1.x");
    }
    Program program;
    program.target = as_string(fields.required("target"), "program.target");
    program.vocab_size =
        static_cast<int>(as_integer(fields.required("vocab_size"), "program.vocab_size", 1, 1 << 24));
    program.limits = limits_from(fields.required("limits"), "program.limits");
    program.arena_bytes = static_cast<uint64_t>(
        as_integer(fields.required("arena_bytes"), "program.arena_bytes", 0, kMaxCount));
    Index values;
    Index weights;
    const nb::object value_list = fields.required("values");
    read_values(value_list, "program.values", program, values);
    read_bases(value_list, "program.values", program, values);
    read_weights(fields.required("weights"), "program.weights", program, weights);
    read_kv_layers(fields.required("kv_layers"), "program.kv_layers", program);
    if (const nb::object kernels = fields.optional("kernels"); kernels.is_valid()) {
        read_kernels(kernels, "program.kernels", images, program);
    }
    if (const nb::object tile = fields.optional("prefill_tile"); tile.is_valid()) {
        program.prefill_tile = static_cast<int>(as_integer(tile, "program.prefill_tile", 0, 1024));
    }
    read_steps(fields.required("steps"), "program.steps", program, values, weights, program.steps);
    if (const nb::object sampling = fields.optional("sampling"); sampling.is_valid()) {
        read_steps(sampling, "program.sampling", program, values, weights, program.sampling);
    }
    if (const nb::object feeding = fields.optional("feeding"); feeding.is_valid()) {
        read_steps(feeding, "program.feeding", program, values, weights, program.feeding);
    }
    if (const nb::object slots = fields.optional("adapters"); slots.is_valid() && !slots.is_none()) {
        program.adapters = adapter_slots_from(slots, "program.adapters");
    }
    check_adapter_places(program);
    fields.finish({"format", "target", "vocab_size", "limits", "arena_bytes", "values", "weights", "steps",
                   "sampling", "feeding", "kv_layers", "kernels", "prefill_tile", "adapters"});
    return program;
}

}  // namespace castiron::bindings
