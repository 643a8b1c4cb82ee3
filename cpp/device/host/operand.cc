#include "device/host/operand.h"

#include <stdexcept>

namespace castiron::host {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 48;

[[noreturn]] void fail(const std::string& what) {
    throw std::invalid_argument(what);
}

// Product that refuses to pass kMaxElements.
int64_t product(int64_t a, int64_t b, const std::string& name) {
    int64_t r = 0;
    if (__builtin_mul_overflow(a, b, &r) || r > kMaxElements) fail(name + ": more than 2^48 elements");
    return r;
}

void check_limits(const Program& p) {
    const Limits& l = p.limits;
    const auto in = [](int value, int high) { return value >= 1 && value <= high; };
    if (!in(l.max_batch_size, 65536) || !in(l.max_num_tokens, 1 << 20) || !in(l.max_logit_rows, 1 << 20) ||
        !in(l.max_seq_len, 1 << 24)) {
        fail(
            "program limits are out of range: expected max_batch_size <= 65536, max_num_tokens and "
            "max_logit_rows <= "
            "2^20, max_seq_len <= 2^24, all at least 1");
    }
}

Operand resolve(const Program& program, const Value& value) {
    const std::string where = "value '" + value.name + "'";
    Operand o;
    o.name = value.name;
    o.dtype = value.dtype;
    o.shape = value.shape;
    if (value.dtype != DType::kF32 && value.dtype != DType::kI32) fail(where + ": dtype must be f32 or i32");
    if (value.shape.empty() || value.shape.size() > 6) fail(where + ": expected 1 to 6 axes");
    int64_t elements = 1;
    for (const Dim d : value.shape) {
        if (d.value < 1 && d.value != Dim::kTokens && d.value != Dim::kRows) {
            fail(where + ": shape " + shape_text(value.shape) + ": sizes are at least 1, or T or N");
        }
        elements =
            product(elements, d.bind(program.limits.max_num_tokens, program.limits.max_logit_rows), where);
    }
    const int64_t rows = value.shape[0].bind(program.limits.max_num_tokens, program.limits.max_logit_rows);

    if (value.base < 0) {
        o.row_stride = value.shape.size() == 2 && !value.shape[1].symbolic() ? value.shape[1].value : 0;
        o.offset = value.offset;
        if (o.offset % 64 != 0)
            fail(where + ": offset " + std::to_string(o.offset) + " is not 64-byte aligned");
        o.end = o.offset + static_cast<uint64_t>(elements) * 4;
    } else {
        o.view = true;
        uint64_t column = 0;
        const Value* at = &value;
        // A view on a view is fine, a cycle is not: more hops than values means one.
        for (size_t hops = 0; at->base >= 0; ++hops) {
            if (static_cast<size_t>(at->base) >= program.values.size())
                fail(where + ": its base does not exist");
            if (hops > program.values.size()) fail(where + ": is a view on itself");
            const Value& base = program.values[static_cast<size_t>(at->base)];
            if (at->shape.size() != 2 || base.shape.size() != 2 || base.shape[0] != at->shape[0]) {
                fail(where + ": a view and its base are two-dimensional with the same rows");
            }
            if (at->shape[1].symbolic() || base.shape[1].symbolic())
                fail(where + ": a view has columns of known number");
            if (base.dtype != value.dtype) fail(where + ": a view has its base's dtype");
            const int64_t width = at->shape[1].value, base_width = base.shape[1].value;
            if (at->column > static_cast<uint64_t>(kMaxElements) ||
                static_cast<int64_t>(at->column) + width > base_width) {
                fail(where + ": columns " + std::to_string(at->column) + " + " + std::to_string(width) +
                     " reach past its base '" + base.name + "'");
            }
            column += at->column;
            at = &base;
        }
        if (at->offset % 64 != 0 || at->offset > program.arena_bytes)
            fail(where + ": its base has a bad offset");
        o.row_stride = at->shape[1].value;
        o.offset = at->offset + column * 4;
        const int64_t span = product(rows - 1, o.row_stride, where) + value.shape[1].value;
        o.end = o.offset + static_cast<uint64_t>(span) * 4;
    }
    if (o.offset > program.arena_bytes || o.end > program.arena_bytes) {
        fail(where + ": ends at byte " + std::to_string(o.end) + " of an arena of " +
             std::to_string(program.arena_bytes) + " bytes");
    }
    return o;
}

// Bytes of a weight as its layout stores it (docs/program.md); refuses a layout that cannot hold the dtype.
int64_t stored_bytes(const Weight& weight, const std::string& where) {
    const auto is = [&](DType a, DType b) { return weight.dtype == a || weight.dtype == b; };
    if (weight.layout == Layout::kPlain) {
        if (weight.dtype != DType::kF32 && weight.dtype != DType::kBF16 && weight.dtype != DType::kI32) {
            fail(where + ": a plain weight's dtype must be f32, bf16 or i32");
        }
        int64_t elements = 1;
        for (const int64_t d : weight.shape) elements = product(elements, d, where);
        return product(elements, weight.dtype == DType::kBF16 ? 2 : 4, where);
    }
    if (weight.shape.size() != 2) fail(where + ": panel layouts hold matrices");
    const int64_t panels = (weight.shape[0] + 15) / 16, k = weight.shape[1];
    switch (weight.layout) {
        case Layout::kPlain:
        case Layout::kWords:
            break;
        case Layout::kPanel16:
            if (!is(DType::kF32, DType::kF16)) fail(where + ": panel16 is for f32 or f16");
            return product(panels, product(k, weight.dtype == DType::kF32 ? 64 : 32, where), where);
        case Layout::kPanel16x2:
            if (weight.dtype != DType::kBF16) fail(where + ": panel16x2 is for bf16");
            return product(panels, product((k + 1) / 2, 64, where), where);
        case Layout::kPanel16x4:
            if (!is(DType::kI8, DType::kF8E4M3)) fail(where + ": panel16x4 is for i8 or f8e4m3");
            return product(panels, product((k + 3) / 4, 64, where), where);
        case Layout::kPanel16x4n:
            if (!is(DType::kI4, DType::kF4E2M1)) fail(where + ": panel16x4n is for i4 or f4e2m1");
            return product(panels, product((k + 3) / 4, 32, where), where);
    }
    fail(where + ": its layout is not one of the host target");
}

}  // namespace

std::string shape_text(const std::vector<Dim>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) {
        if (i > 0) text += ", ";
        const int64_t d = shape[i].value;
        text += d == Dim::kTokens ? "T" : d == Dim::kRows ? "N" : std::to_string(d);
    }
    return text + "]";
}

std::vector<Operand> resolve_values(const Program& program) {
    check_limits(program);
    if (program.arena_bytes > uint64_t{1} << 46)
        fail("arena of " + std::to_string(program.arena_bytes) + " bytes");
    std::vector<Operand> operands;
    operands.reserve(program.values.size());
    for (const Value& value : program.values) operands.push_back(resolve(program, value));
    return operands;
}

std::vector<ResolvedWeight> resolve_weights(const Program& program) {
    std::vector<ResolvedWeight> resolved;
    resolved.reserve(program.weights.size());
    uint64_t offset = 0;
    for (const Weight& weight : program.weights) {
        const std::string where = "weight '" + weight.name + "'";
        if (weight.shape.empty() || weight.shape.size() > 6) fail(where + ": expected 1 to 6 axes");
        for (const int64_t d : weight.shape) {
            if (d < 1 || d > kMaxElements) fail(where + ": sizes must be at least 1");
        }
        ResolvedWeight r;
        r.weight = &weight;
        r.bytes = static_cast<size_t>(stored_bytes(weight, where));
        if (weight.data == nullptr || weight.bytes < r.bytes) {
            fail(where + ": has " + std::to_string(weight.data == nullptr ? 0 : weight.bytes) +
                 " bytes, its shape and layout need " + std::to_string(r.bytes));
        }
        r.offset = offset;
        offset += (r.bytes + 63) / 64 * 64;
        resolved.push_back(r);
    }
    return resolved;
}

}  // namespace castiron::host
