// unary, clip and binary.
#include <algorithm>
#include <array>

#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

// Runs of elements start on cache lines, so that threads do not share one.
constexpr int64_t kLine = 16;

constexpr std::pair<std::string_view, UnaryFn> kUnary[] = {
    {"silu", UnaryFn::kSilu},
    {"gelu_tanh", UnaryFn::kGeluTanh},
    {"gelu_erf", UnaryFn::kGeluErf},
    {"gelu_quick", UnaryFn::kGeluQuick},
    {"relu", UnaryFn::kRelu},
    {"relu2", UnaryFn::kRelu2},
    {"tanh", UnaryFn::kTanh},
    {"sigmoid", UnaryFn::kSigmoid},
    {"exp", UnaryFn::kExp},
    {"log", UnaryFn::kLog},
    {"sqrt", UnaryFn::kSqrt},
    {"rsqrt", UnaryFn::kRsqrt},
    {"neg", UnaryFn::kNeg},
    {"abs", UnaryFn::kAbs},
    {"reciprocal", UnaryFn::kReciprocal},
    {"softplus", UnaryFn::kSoftplus},
    {"sin", UnaryFn::kSin},
    {"cos", UnaryFn::kCos},
    {"erf", UnaryFn::kErf},
    {"square", UnaryFn::kSquare},
};

constexpr std::pair<std::string_view, BinaryFn> kBinary[] = {
    {"add", BinaryFn::kAdd}, {"sub", BinaryFn::kSub}, {"mul", BinaryFn::kMul}, {"div", BinaryFn::kDiv},
    {"min", BinaryFn::kMin}, {"max", BinaryFn::kMax}, {"pow", BinaryFn::kPow},
};

template <typename Fn, size_t N>
Fn read_fn(StepChecker& step, const std::pair<std::string_view, Fn> (&table)[N]) {
    const std::string name = step.text("fn");
    for (const auto& [known, fn] : table) {
        if (known == name) return fn;
    }
    step.fail("unknown fn '" + name + "'");
}

// One contiguous value to another of the same shape.
class Map : public Op {
public:
    explicit Map(StepChecker& step) : kernels_(step.kernels()) {
        step.expect(1, 0, 1);
        x_ = step.input(0);
        y_ = step.output(0);
        step.check(x_, DType::kF32, x_.shape);
        step.check(y_, DType::kF32, x_.shape);
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const auto [begin, end] = lane.share(context.elements(x_), kLine);
        apply(context.f32(x_) + begin, context.f32(y_) + begin, end - begin);
    }

protected:
    virtual void apply(const float* x, float* y, int64_t n) const = 0;
    const KernelTable& kernels_;

private:
    Operand x_, y_;
};

class Unary final : public Map {
public:
    explicit Unary(StepChecker& step) : Map(step), fn_(read_fn(step, kUnary)) { step.finish({{0, 0}}); }

private:
    void apply(const float* x, float* y, int64_t n) const override { kernels_.unary(fn_, x, y, n); }
    UnaryFn fn_;
};

class Clip final : public Map {
public:
    explicit Clip(StepChecker& step)
        : Map(step),
          low_(static_cast<float>(step.number("min"))),
          high_(static_cast<float>(step.number("max"))) {
        step.finish({{0, 0}});
    }

private:
    void apply(const float* x, float* y, int64_t n) const override { kernels_.clip(x, y, n, low_, high_); }
    float low_, high_;
};

// numpy broadcasting: shapes are aligned at the right and missing or unit axes repeat.
class Binary final : public Op {
public:
    explicit Binary(StepChecker& step) : kernels_(step.kernels()), fn_(read_fn(step, kBinary)) {
        const bool b_weight = step.flag("b_weight");
        const bool reverse = step.flag("reverse");
        step.expect(b_weight ? 1 : 2, b_weight ? 1 : 0, 1);
        y_ = step.output(0);
        step.check(y_, DType::kF32, y_.shape);
        Side& first = sides_[reverse ? 1 : 0];
        Side& second = sides_[reverse ? 0 : 1];
        first.value = step.input(0);
        step.check(first.value, DType::kF32, first.value.shape);
        std::vector<Dim> b_shape;
        if (b_weight) {
            const std::vector<int64_t>& shape = step.weight(0).weight->shape;
            second.weight = step.vector_weight(0, shape);
            for (const int64_t d : shape) b_shape.push_back(Dim{d});
        } else {
            second.value = step.input(1);
            step.check(second.value, DType::kF32, second.value.shape);
            b_shape = second.value.shape;
        }
        align(step, first, first.value.shape);
        align(step, second, b_shape);
        for (size_t i = 0; i < y_.shape.size(); ++i) {
            if (!first.spans[i] && !second.spans[i] && y_.shape[i] != Dim{1}) {
                step.fail("output shape " + shape_text(y_.shape) + " is not the broadcast of its operands");
            }
        }
        b_weight ? step.finish({{0, 0}}) : step.finish({{0, 0}, {0, 1}});
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        // Axes from the innermost on; neighbours over which both sides run on (or stand still) become one.
        struct Axis {
            int64_t size, stride[2];
        };
        std::array<Axis, 6> axes{};
        size_t rank = 0;
        int64_t elements = 1, strides[2] = {1, 1};
        for (size_t i = y_.shape.size(); i-- > 0;) {
            const int64_t size = context.bind(y_.shape[i]);
            elements *= size;
            Axis axis{size, {0, 0}};
            for (size_t side = 0; side < 2; ++side) {
                if (!sides_[side].spans[i]) continue;
                axis.stride[side] = strides[side];
                strides[side] *= size;
            }
            if (size == 1) continue;
            Axis* inner = rank > 0 ? &axes[rank - 1] : nullptr;
            if (inner != nullptr && axis.stride[0] == inner->stride[0] * inner->size &&
                axis.stride[1] == inner->stride[1] * inner->size) {
                inner->size *= size;
            } else {
                axes[rank++] = axis;
            }
        }
        if (elements == 0) return;
        const float* base[2];
        for (size_t side = 0; side < 2; ++side) {
            base[side] =
                sides_[side].weight != nullptr ? sides_[side].weight : context.f32(sides_[side].value);
        }
        float* y = context.f32(y_);
        const int64_t run = rank > 0 ? axes[0].size : 1;
        const auto [begin, end] = lane.share(elements, kLine);
        for (int64_t at = begin; at < end;) {
            const int64_t inner = at % run, count = std::min(run - inner, end - at);
            int64_t rest = at / run;
            int64_t offset[2] = {inner * axes[0].stride[0], inner * axes[0].stride[1]};
            for (size_t i = 1; i < rank; ++i) {
                const int64_t index = rest % axes[i].size;
                rest /= axes[i].size;
                offset[0] += index * axes[i].stride[0];
                offset[1] += index * axes[i].stride[1];
            }
            kernels_.binary(fn_, base[0] + offset[0], axes[0].stride[0], base[1] + offset[1],
                            axes[0].stride[1], y + at, count);
            at += count;
        }
    }

private:
    struct Side {
        Operand value;
        const float* weight = nullptr;
        std::array<bool, 6> spans{};  // by output axis: the operand has this axis
    };

    void align(StepChecker& step, Side& side, const std::vector<Dim>& shape) const {
        const size_t rank = y_.shape.size();
        if (shape.size() > rank) step.fail("an operand has more axes than the output");
        for (size_t i = 0; i < shape.size(); ++i) {
            const size_t axis = rank - shape.size() + i;
            if (shape[i] == Dim{1}) continue;
            if (shape[i] != y_.shape[axis]) {
                step.fail("operand shape " + shape_text(shape) + " does not broadcast to " +
                          shape_text(y_.shape));
            }
            side.spans[axis] = true;
        }
    }

    const KernelTable& kernels_;
    BinaryFn fn_;
    Side sides_[2];
    Operand y_;
};

}  // namespace

std::unique_ptr<Op> make_unary(StepChecker& step) {
    return std::make_unique<Unary>(step);
}
std::unique_ptr<Op> make_clip(StepChecker& step) {
    return std::make_unique<Clip>(step);
}
std::unique_ptr<Op> make_binary(StepChecker& step) {
    return std::make_unique<Binary>(step);
}

}  // namespace castiron::host
