#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

class Norm final : public Op {
public:
    explicit Norm(StepChecker& step) : kernels_(step.kernels()) {
        const std::string& kernel = step.step().kernel;
        add_ = kernel.starts_with("add_");
        layer_ = kernel.ends_with("layer_norm");
        const bool has_weight = step.flag("has_weight");
        const bool has_bias = layer_ && step.flag("has_bias");
        step.expect(add_ ? 2 : 1, size_t{has_weight} + size_t{has_bias}, add_ ? 2 : 1);
        x_ = step.input(0);
        y_ = step.output(0);
        args_.columns = step.matrix(x_, !add_);
        step.check(y_, DType::kF32, x_.shape);
        args_.group = add_ ? 0 : step.integer_or("group", 0, 0, args_.columns);
        if (args_.group == 0) args_.group = args_.columns;
        if (args_.columns % args_.group != 0) {
            step.fail("group " + std::to_string(args_.group) + " does not divide " +
                      std::to_string(args_.columns) + " columns");
        }
        const double eps = step.number("eps");
        if (eps < 0) step.fail("eps is negative");
        args_.eps = static_cast<float>(eps);
        if (has_weight) args_.weight = step.vector_weight(0, {args_.group});
        if (has_bias) args_.bias = step.vector_weight(has_weight ? 1 : 0, {args_.group});
        if (add_) {
            residual_ = step.input(1);
            sum_ = step.output(1);
            step.check(residual_, DType::kF32, x_.shape);
            step.check(sum_, DType::kF32, x_.shape);
            step.finish({{0, 0}, {0, 1}, {1, 0}, {1, 1}});
        } else {
            step.finish();
        }
        rounds_ = step.round_output(0);
    }

    [[nodiscard]] size_t scratch_floats() const override {
        return rounds_ ? static_cast<size_t>(args_.columns) : 0;
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const auto [begin, end] = lane.share(context.bind(x_.shape[0]));
        NormArgs args = args_;
        for (int64_t row = begin; row < end; ++row) {
            args.x = context.f32(x_) + row * x_.row_stride;
            args.y = rounds_ ? lane.scratch : context.f32(y_) + row * args.columns;
            if (add_) {
                args.residual = context.f32(residual_) + row * args.columns;
                args.sum = context.f32(sum_) + row * args.columns;
            }
            layer_ ? kernels_.layer_norm(args) : kernels_.rms_norm(args);
            if (rounds_) {
                kernels_.bf16.round_row(args.y, args.columns,
                                        context.rounded(y_) + row * bf16_row_bytes(args.columns));
            }
        }
    }

private:
    const KernelTable& kernels_;
    Operand x_, residual_, y_, sum_;
    NormArgs args_;
    bool add_ = false, layer_ = false;
    bool rounds_ = false;  // whether y is rows of bf16
};

}  // namespace

std::unique_ptr<Op> make_norm(StepChecker& step) {
    return std::make_unique<Norm>(step);
}

}  // namespace castiron::host
