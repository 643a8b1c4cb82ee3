// Ops that only move elements: copy, transpose, slice, concat, gather_rows, gather. They serve f32 and i32
// alike.
#include <algorithm>
#include <array>
#include <cstring>

#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

constexpr size_t kElement = 4;

// A size as a product of a number and powers of T and N, to compare element counts of symbolic shapes.
struct Count {
    int64_t number = 1;
    int tokens = 0, rows = 0;
    bool operator==(const Count&) const = default;
};

Count count_of(const std::vector<Dim>& shape, size_t begin, size_t end) {
    Count c;
    for (size_t i = begin; i < end; ++i) {
        if (shape[i].value == Dim::kTokens) {
            ++c.tokens;
        } else if (shape[i].value == Dim::kRows) {
            ++c.rows;
        } else {
            c.number *= shape[i].value;
        }
    }
    return c;
}

int64_t product_of(const StepContext& context, const std::vector<Dim>& shape, size_t begin, size_t end) {
    int64_t n = 1;
    for (size_t i = begin; i < end; ++i) n *= context.bind(shape[i]);
    return n;
}

size_t read_axis(StepChecker& step, size_t rank) {
    const auto r = static_cast<int64_t>(rank);
    const int64_t axis = step.integer("axis", -r, r - 1);
    return static_cast<size_t>(axis < 0 ? axis + r : axis);
}

void check_same_dtype(const StepChecker& step, const Operand& in, const Operand& out) {
    if (in.dtype != out.dtype) step.fail("'" + in.name + "' and '" + out.name + "' have different dtypes");
}

class Copy final : public Op {
public:
    explicit Copy(StepChecker& step) {
        step.expect(1, 0, 1);
        x_ = step.input(0);
        y_ = step.output(0);
        check_same_dtype(step, x_, y_);
        if (count_of(x_.shape, 0, x_.shape.size()) != count_of(y_.shape, 0, y_.shape.size())) {
            step.fail("shapes " + shape_text(x_.shape) + " and " + shape_text(y_.shape) + " differ in size");
        }
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        std::byte* to = context.arena + y_.offset;
        const std::byte* from = context.arena + x_.offset;
        if (!x_.view) {
            const auto [begin, end] = lane.share(context.elements(x_), 16);
            std::memcpy(to + static_cast<size_t>(begin) * kElement,
                        from + static_cast<size_t>(begin) * kElement,
                        static_cast<size_t>(end - begin) * kElement);
            return;
        }
        const auto columns = static_cast<size_t>(x_.shape[1].value);
        const auto [begin, end] = lane.share(context.bind(x_.shape[0]));
        for (int64_t row = begin; row < end; ++row) {
            const auto r = static_cast<size_t>(row);
            std::memcpy(to + r * columns * kElement, from + r * static_cast<size_t>(x_.row_stride) * kElement,
                        columns * kElement);
        }
    }

private:
    Operand x_, y_;
};

class Transpose final : public Op {
public:
    explicit Transpose(StepChecker& step) {
        step.expect(1, 0, 1);
        x_ = step.input(0);
        y_ = step.output(0);
        step.check_contiguous(x_);
        check_same_dtype(step, x_, y_);
        const std::vector<int64_t> perm = step.integers("perm");
        const size_t rank = x_.shape.size();
        std::array<bool, 6> seen{};
        if (perm.size() != rank || y_.shape.size() != rank)
            step.fail("perm and output must have the input's axes");
        for (size_t i = 0; i < rank; ++i) {
            if (perm[i] < 0 || perm[i] >= static_cast<int64_t>(rank) || seen[static_cast<size_t>(perm[i])]) {
                step.fail("perm is not a permutation of the axes");
            }
            seen[static_cast<size_t>(perm[i])] = true;
            perm_[i] = static_cast<size_t>(perm[i]);
            if (y_.shape[i] != x_.shape[perm_[i]])
                step.fail("output shape " + shape_text(y_.shape) + " is not the permuted input's");
        }
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const size_t rank = x_.shape.size();
        std::array<int64_t, 6> input_stride{}, size{}, stride{};
        int64_t n = 1;
        for (size_t i = rank; i-- > 0;) {
            input_stride[i] = n;
            n *= context.bind(x_.shape[i]);
        }
        for (size_t i = 0; i < rank; ++i) {
            size[i] = context.bind(y_.shape[i]);
            stride[i] = input_stride[perm_[i]];
        }
        const auto* x = reinterpret_cast<const uint32_t*>(context.arena + x_.offset);
        auto* y = reinterpret_cast<uint32_t*>(context.arena + y_.offset);
        const int64_t inner = size[rank - 1];
        if (n == 0) return;
        const auto [begin, end] = lane.share(n / inner);
        for (int64_t line = begin; line < end; ++line) {
            int64_t rest = line, from = 0;
            for (size_t i = rank - 1; i-- > 0;) {
                from += rest % size[i] * stride[i];
                rest /= size[i];
            }
            for (int64_t i = 0; i < inner; ++i) y[line * inner + i] = x[from + i * stride[rank - 1]];
        }
    }

private:
    Operand x_, y_;
    std::array<size_t, 6> perm_{};
};

class Slice final : public Op {
public:
    explicit Slice(StepChecker& step) {
        step.expect(1, 0, 1);
        x_ = step.input(0);
        y_ = step.output(0);
        step.check_contiguous(x_);
        check_same_dtype(step, x_, y_);
        if (x_.shape.size() != y_.shape.size()) step.fail("input and output must have the same axes");
        axis_ = read_axis(step, x_.shape.size());
        start_ = step.integer("start", 0, int64_t{1} << 40);
        step_ = step.integer_or("step", 1, -(int64_t{1} << 40), int64_t{1} << 40);
        for (size_t i = 0; i < x_.shape.size(); ++i) {
            if (i != axis_ && x_.shape[i] != y_.shape[i])
                step.fail("shapes may differ on the sliced axis only");
        }
        const Dim in = x_.shape[axis_], out = y_.shape[axis_];
        if (in.symbolic() || out.symbolic()) {
            if (in != out || start_ != 0 || step_ != 1) step.fail("T and N axes can only be taken whole");
        } else {
            int64_t reach = 0;
            if (__builtin_mul_overflow(out.value - 1, step_, &reach)) step.fail("step is too large");
            reach += start_;
            if (start_ >= in.value || reach < 0 || reach >= in.value) {
                step.fail("start " + std::to_string(start_) + ", step " + std::to_string(step_) +
                          ", length " + std::to_string(out.value) + " leave an axis of " +
                          std::to_string(in.value));
            }
        }
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const int64_t inner = product_of(context, x_.shape, axis_ + 1, x_.shape.size());
        const int64_t length = context.bind(y_.shape[axis_]), whole = context.bind(x_.shape[axis_]);
        const auto [begin, end] = lane.share(product_of(context, x_.shape, 0, axis_) * length);
        const std::byte* x = context.arena + x_.offset;
        std::byte* y = context.arena + y_.offset;
        for (int64_t line = begin; line < end; ++line) {
            const int64_t from = (line / length * whole + start_ + line % length * step_) * inner;
            std::memcpy(y + static_cast<size_t>(line * inner) * kElement,
                        x + static_cast<size_t>(from) * kElement, static_cast<size_t>(inner) * kElement);
        }
    }

private:
    Operand x_, y_;
    size_t axis_ = 0;
    int64_t start_ = 0, step_ = 1;
};

class Concat final : public Op {
public:
    explicit Concat(StepChecker& step) {
        if (step.step().inputs.empty()) step.fail("has no inputs");
        step.expect(step.step().inputs.size(), 0, 1);
        y_ = step.output(0);
        axis_ = read_axis(step, y_.shape.size());
        int64_t total = 0;
        for (size_t i = 0; i < step.step().inputs.size(); ++i) {
            const Operand& x = step.input(i);
            step.check_contiguous(x);
            check_same_dtype(step, x, y_);
            if (x.shape.size() != y_.shape.size())
                step.fail("'" + x.name + "' has other axes than the output");
            for (size_t a = 0; a < x.shape.size(); ++a) {
                if (a != axis_ && x.shape[a] != y_.shape[a])
                    step.fail("'" + x.name + "' differs from the output on another axis");
            }
            if (x.shape[axis_].symbolic()) step.fail("T and N axes cannot be joined");
            total += x.shape[axis_].value;
            inputs_.push_back(x);
        }
        if (y_.shape[axis_] != Dim{total}) step.fail("the output's axis must be " + std::to_string(total));
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const int64_t inner = product_of(context, y_.shape, axis_ + 1, y_.shape.size());
        const auto [begin, end] = lane.share(product_of(context, y_.shape, 0, axis_));
        std::byte* y = context.arena + y_.offset;
        for (int64_t line = begin; line < end; ++line) {
            auto at = static_cast<size_t>(line * y_.shape[axis_].value * inner) * kElement;
            for (const Operand& x : inputs_) {
                const size_t bytes = static_cast<size_t>(x.shape[axis_].value * inner) * kElement;
                std::memcpy(y + at, context.arena + x.offset + static_cast<size_t>(line) * bytes, bytes);
                at += bytes;
            }
        }
    }

private:
    std::vector<Operand> inputs_;
    Operand y_;
    size_t axis_ = 0;
};

class GatherRows final : public Op {
public:
    explicit GatherRows(StepChecker& step) {
        step.expect(2, 0, 1);
        x_ = step.input(0);
        rows_ = step.input(1);
        y_ = step.output(0);
        if (x_.shape.size() != 2 || x_.shape[1].symbolic() || rows_.shape.size() != 1) {
            step.fail("expected x [R, C] and rows [N]");
        }
        step.check(rows_, DType::kI32, rows_.shape);
        step.check(y_, x_.dtype, {rows_.shape[0], x_.shape[1]});
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const int64_t columns = x_.shape[1].value, height = context.bind(x_.shape[0]);
        const auto [begin, end] = lane.share(context.bind(rows_.shape[0]));
        const int32_t* rows = context.i32(rows_);
        for (int64_t i = begin; i < end; ++i) {
            const int64_t row = rows[i];
            float* to = context.f32(y_) + i * columns;
            if (row < 0 || row >= height) {
                context.report("gather_rows: a row index is out of range");
                std::memset(to, 0, static_cast<size_t>(columns) * kElement);
            } else {
                std::memcpy(to, context.f32(x_) + row * x_.row_stride,
                            static_cast<size_t>(columns) * kElement);
            }
        }
    }

private:
    Operand x_, rows_, y_;
};

// ONNX Gather: output shape is x's with the axis replaced by the indices' axes; negative indices count from
// the end.
class Gather final : public Op {
public:
    explicit Gather(StepChecker& step) {
        const bool x_weight = step.flag("x_weight");
        step.expect(x_weight ? 1 : 2, x_weight ? 1 : 0, 1);
        indices_ = step.input(x_weight ? 0 : 1);
        y_ = step.output(0);
        step.check(indices_, DType::kI32, indices_.shape);
        if (x_weight) {
            for (const int64_t d : step.weight(0).weight->shape) shape_.push_back(Dim{d});
            weight_ = reinterpret_cast<const std::byte*>(step.vector_weight(0, step.weight(0).weight->shape));
            if (y_.dtype != DType::kF32) step.fail("'" + y_.name + "' must be f32");
        } else {
            x_ = step.input(0);
            step.check_contiguous(x_);
            check_same_dtype(step, x_, y_);
            shape_ = x_.shape;
        }
        axis_ = step.step().attrs.contains("axis") ? read_axis(step, shape_.size()) : 0;
        std::vector<Dim> expected(shape_.begin(), shape_.begin() + static_cast<std::ptrdiff_t>(axis_));
        expected.insert(expected.end(), indices_.shape.begin(), indices_.shape.end());
        expected.insert(expected.end(), shape_.begin() + static_cast<std::ptrdiff_t>(axis_) + 1,
                        shape_.end());
        if (y_.shape != expected)
            step.fail("output has shape " + shape_text(y_.shape) + ", expected " + shape_text(expected));
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const int64_t inner = product_of(context, shape_, axis_ + 1, shape_.size());
        const int64_t picks = context.elements(indices_), height = context.bind(shape_[axis_]);
        const auto [begin, end] = lane.share(product_of(context, shape_, 0, axis_) * picks);
        const std::byte* x = weight_ != nullptr ? weight_ : context.arena + x_.offset;
        std::byte* y = context.arena + y_.offset;
        const size_t bytes = static_cast<size_t>(inner) * kElement;
        for (int64_t line = begin; line < end; ++line) {
            int64_t index = context.i32(indices_)[line % picks];
            if (index < 0) index += height;
            std::byte* to = y + static_cast<size_t>(line) * bytes;
            if (index < 0 || index >= height) {
                context.report("gather: an index is out of range");
                std::memset(to, 0, bytes);
            } else {
                std::memcpy(to, x + static_cast<size_t>(line / picks * height + index) * bytes, bytes);
            }
        }
    }

private:
    Operand x_, indices_, y_;
    std::vector<Dim> shape_;
    const std::byte* weight_ = nullptr;
    size_t axis_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_copy(StepChecker& step) {
    return std::make_unique<Copy>(step);
}
std::unique_ptr<Op> make_transpose(StepChecker& step) {
    return std::make_unique<Transpose>(step);
}
std::unique_ptr<Op> make_slice(StepChecker& step) {
    return std::make_unique<Slice>(step);
}
std::unique_ptr<Op> make_concat(StepChecker& step) {
    return std::make_unique<Concat>(step);
}
std::unique_ptr<Op> make_gather_rows(StepChecker& step) {
    return std::make_unique<GatherRows>(step);
}
std::unique_ptr<Op> make_gather(StepChecker& step) {
    return std::make_unique<Gather>(step);
}

}  // namespace castiron::host
