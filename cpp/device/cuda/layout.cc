#include "device/cuda/layout.h"

#include <stdexcept>

#include "program/sizes.h"

namespace castiron::cuda {
namespace {

constexpr uint64_t kValueAlignment = 64;
constexpr uint64_t kWeightAlignment = 256;
constexpr int64_t kMaxElements = int64_t{1} << 48;

const char* dtype_text(DType dtype) {
    switch (dtype) {
        case DType::kF32:
            return "f32";
        case DType::kI32:
            return "i32";
        case DType::kBF16:
            return "bf16";
        case DType::kF16:
            return "f16";
        case DType::kI8:
            return "i8";
        case DType::kU8:
            return "u8";
        case DType::kF8E4M3:
            return "f8e4m3";
        case DType::kI4:
            return "i4";
        case DType::kF4E2M1:
            return "f4e2m1";
    }
    return "?";
}

std::string dim_text(Dim dim) {
    static constexpr char kSymbols[] = "TNSDPRELVAB";
    if (!dim.symbolic()) return std::to_string(dim.value);
    const auto index = static_cast<size_t>(-dim.value - 1);
    return index < kNumSymbols ? std::string(1, kSymbols[index]) : "?";
}

[[noreturn]] void fail(const std::string& what) {
    throw std::invalid_argument(what);
}

int64_t multiply(int64_t a, int64_t b, const std::string& name) {
    int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || product > kMaxElements) {
        fail(name + " has more than 2^48 elements");
    }
    return product;
}

void check_limits(const Limits& limits) {
    const auto in = [](int value, int high) { return value >= 1 && value <= high; };
    if (!in(limits.max_batch_size, 65536) || !in(limits.max_num_tokens, 1 << 20) ||
        !in(limits.max_logit_rows, 1 << 20) || !in(limits.max_seq_len, 1 << 24)) {
        fail(
            "program limits are out of range: expected max_batch_size <= 65536, max_num_tokens and "
            "max_logit_rows <= 2^20, max_seq_len <= 2^24, all at least 1");
    }
}

// Bytes from the value's first element to the end of its last, at the largest counts.
uint64_t value_span(const Value& value, const Value* base, const Counts& largest, const std::string& where) {
    if (value.shape.empty() || value.shape.size() > 6) fail(where + " must have 1 to 6 axes");
    int64_t elements = 1;
    for (const Dim dim : value.shape) {
        if (dim.value == 0 || dim.value < -static_cast<int64_t>(kNumSymbols)) {
            fail(where + ": sizes are at least 1, or a symbol");
        }
        elements = multiply(elements, largest.bind(dim), where);
    }
    if (base != nullptr) {
        const int64_t rows = largest.bind(value.shape[0]);
        elements = multiply(rows - 1, base->shape[1].value, where) + value.shape[1].value;
    }
    return static_cast<uint64_t>(elements) * item_bytes(value.dtype);
}

const Value* base_of(const Program& program, const Value& value, const std::string& where) {
    if (value.base < 0) return nullptr;
    if (static_cast<size_t>(value.base) >= program.values.size()) fail(where + ": its base does not exist");
    const Value& base = program.values[static_cast<size_t>(value.base)];
    const bool fits = base.base < 0 && value.shape.size() == 2 && base.shape.size() == 2 &&
                      value.shape[0] == base.shape[0] && value.dtype == base.dtype &&
                      !value.shape[1].symbolic() && !base.shape[1].symbolic() &&
                      value.column <= static_cast<uint64_t>(kMaxElements) &&
                      static_cast<int64_t>(value.column) + value.shape[1].value <= base.shape[1].value;
    if (!fits) fail(where + " is not a view on columns of \"" + base.name + "\"");
    return &base;
}

}  // namespace

std::string type_text(DType dtype, const std::vector<Dim>& shape) {
    std::string text = std::string(dtype_text(dtype)) + " [";
    for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + dim_text(shape[i]);
    return text + "]";
}

std::vector<uint64_t> value_offsets(const Program& program) {
    check_limits(program.limits);
    if (program.arena_bytes > uint64_t{1} << 46) {
        fail("arena_bytes is " + std::to_string(program.arena_bytes) + "; no device has so much memory");
    }
    const Counts largest = counts_at_limits(program);
    std::vector<uint64_t> offsets;
    offsets.reserve(program.values.size());
    for (const Value& value : program.values) {
        const std::string where = "value \"" + value.name + "\"";
        const Value* base = base_of(program, value, where);
        const uint64_t span = value_span(value, base, largest, where);
        uint64_t offset = value.offset;
        if (base != nullptr) offset = base->offset + value.column * item_bytes(value.dtype);
        if (base == nullptr && offset % kValueAlignment != 0) {
            fail(where + " begins at byte " + std::to_string(offset) + "; a multiple of 64 is expected");
        }
        if (offset > program.arena_bytes || span > program.arena_bytes - offset) {
            fail(where + " takes " + std::to_string(span) + " bytes from byte " + std::to_string(offset) +
                 " on; the arena has " + std::to_string(program.arena_bytes));
        }
        offsets.push_back(offset);
    }
    return offsets;
}

WeightPlaces weight_places(const Program& program) {
    WeightPlaces places;
    for (const Weight& weight : program.weights) {
        const std::string where = "weight \"" + weight.name + "\"";
        const bool words = weight.layout == Layout::kWords;
        const bool halves = weight.dtype == DType::kI4 || weight.dtype == DType::kF4E2M1;
        if (words != halves || (!words && weight.layout != Layout::kPlain)) {
            fail(where + ": a CUDA program has codes of four bits in words, and all else in plain layout");
        }
        if (weight.shape.empty() || weight.shape.size() > 6 || (words && weight.shape.size() != 2)) {
            fail(where + " must have 1 to 6 axes, and 2 in words");
        }
        int64_t elements = 1;
        for (const int64_t size : weight.shape) {
            if (size < 1) fail(where + ": sizes are at least 1");
            elements = multiply(elements, size, where);
        }
        const uint64_t bytes = stored_bytes(weight);
        const uint64_t found = weight.data == nullptr ? 0 : weight.bytes;
        if (found < bytes) {
            fail(where + " has " + std::to_string(found) + " bytes; its shape needs " +
                 std::to_string(bytes));
        }
        places.offsets.push_back(places.bytes);
        places.bytes += (bytes + kWeightAlignment - 1) / kWeightAlignment * kWeightAlignment;
    }
    return places;
}

int find_value(const Program& program, const std::string& name, DType dtype, const std::vector<Dim>& shape,
               bool required) {
    for (size_t i = 0; i < program.values.size(); ++i) {
        const Value& value = program.values[i];
        if (value.name != name) continue;
        if (value.dtype != dtype || value.shape != shape || value.base >= 0) {
            fail("value \"" + name + "\" is " + type_text(value.dtype, value.shape) +
                 (value.base >= 0 ? ", a view" : "") + "; expected " + type_text(dtype, shape));
        }
        return static_cast<int>(i);
    }
    if (required) fail("the program has no value \"" + name + "\" (" + type_text(dtype, shape) + ")");
    return -1;
}

}  // namespace castiron::cuda
