// reduce, softmax and the generic matmul.
#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

class Reduce final : public Op {
public:
    explicit Reduce(StepChecker& step) : kernels_(step.kernels()) {
        step.expect(1, 0, 1);
        x_ = step.input(0);
        y_ = step.output(0);
        step.check(x_, DType::kF32, x_.shape);
        std::vector<Dim> gone(x_.shape.begin(), x_.shape.end() - 1), kept = gone;
        kept.push_back(Dim{1});
        if (y_.shape != gone && y_.shape != kept)
            step.fail("output must be the input without its last axis, or with one of size 1");
        step.check_f32(y_);
        const std::string fn = step.text("fn");
        if (fn == "sum") {
            fn_ = ReduceFn::kSum;
        } else if (fn == "mean") {
            fn_ = ReduceFn::kMean;
        } else if (fn == "max") {
            fn_ = ReduceFn::kMax;
        } else {
            step.fail("unknown fn '" + fn + "'");
        }
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const int64_t n = context.bind(x_.shape.back());
        const auto [begin, end] = lane.share(context.elements(y_), 16);
        for (int64_t row = begin; row < end; ++row) {
            context.f32(y_)[row] = kernels_.reduce(fn_, context.f32(x_) + row * n, n);
        }
    }

private:
    const KernelTable& kernels_;
    Operand x_, y_;
    ReduceFn fn_ = ReduceFn::kSum;
};

class Softmax final : public Op {
public:
    explicit Softmax(StepChecker& step) : kernels_(step.kernels()) {
        step.expect(1, 0, 1);
        x_ = step.input(0);
        y_ = step.output(0);
        step.check(x_, DType::kF32, x_.shape);
        step.check(y_, DType::kF32, x_.shape);
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const int64_t n = context.bind(x_.shape.back());
        if (n == 0) return;
        const auto [begin, end] = lane.share(context.elements(x_) / n);
        for (int64_t row = begin; row < end; ++row) {
            kernels_.softmax(context.f32(x_) + row * n, context.f32(y_) + row * n, n);
        }
    }

private:
    const KernelTable& kernels_;
    Operand x_, y_;
};

class MatMul final : public Op {
public:
    explicit MatMul(StepChecker& step) : kernels_(step.kernels()) {
        step.expect(2, 0, 1);
        a_ = step.input(0);
        b_ = step.input(1);
        y_ = step.output(0);
        const size_t rank = a_.shape.size();
        if (rank < 2 || b_.shape.size() != rank) step.fail("operands must have the same axes, at least two");
        step.check(a_, DType::kF32, a_.shape);
        std::vector<Dim> b_shape(a_.shape.begin(), a_.shape.end() - 2), y_shape = b_shape;
        b_shape.insert(b_shape.end(), {a_.shape[rank - 1], b_.shape[rank - 1]});
        y_shape.insert(y_shape.end(), {a_.shape[rank - 2], b_.shape[rank - 1]});
        step.check(b_, DType::kF32, b_shape);
        step.check(y_, DType::kF32, y_shape);
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const size_t rank = a_.shape.size();
        const int64_t m = context.bind(a_.shape[rank - 2]), k = context.bind(a_.shape[rank - 1]);
        const int64_t n = context.bind(b_.shape[rank - 1]);
        if (m == 0 || n == 0) return;
        const auto [begin, end] = lane.share(context.elements(y_) / n);
        for (int64_t row = begin; row < end; ++row) {
            kernels_.matmul(context.f32(a_) + row * k, context.f32(b_) + row / m * k * n,
                            context.f32(y_) + row * n, k, n);
        }
    }

private:
    const KernelTable& kernels_;
    Operand a_, b_, y_;
};

}  // namespace

std::unique_ptr<Op> make_reduce(StepChecker& step) {
    return std::make_unique<Reduce>(step);
}
std::unique_ptr<Op> make_softmax(StepChecker& step) {
    return std::make_unique<Softmax>(step);
}
std::unique_ptr<Op> make_matmul(StepChecker& step) {
    return std::make_unique<MatMul>(step);
}

}  // namespace castiron::host
