#include <optional>

#include "device/host/ops/ops.h"
#include "device/host/ops/rope_table.h"

namespace castiron::host {
namespace {

class Rope final : public Op {
public:
    explicit Rope(StepChecker& step)
        : kernels_(step.kernels()),
          heads_(step.integer("heads", 1, 65536)),
          head_dim_(step.integer("head_dim", 1, 4096)) {
        step.expect(2, 2, 1);
        table_.emplace(step, head_dim_);
        x_ = step.input(0);
        positions_ = step.input(1);
        y_ = step.output(0);
        step.check(x_, DType::kF32, {x_.shape[0], Dim{heads_ * head_dim_}}, true);
        step.check(positions_, DType::kI32, {x_.shape[0]});
        step.check(y_, DType::kF32, x_.shape);
        step.finish({{0, 0}});
    }

    [[nodiscard]] size_t scratch_floats() const override { return table_->scratch_floats(); }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const auto [begin, end] = lane.share(context.bind(x_.shape[0]));
        for (int64_t t = begin; t < end; ++t) {
            table_->rotate(context, kernels_, heads_, context.i32(positions_)[t],
                           context.f32(x_) + t * x_.row_stride, context.f32(y_) + t * heads_ * head_dim_,
                           lane.scratch);
        }
    }

private:
    const KernelTable& kernels_;
    int64_t heads_, head_dim_;
    std::optional<RopeTable> table_;
    Operand x_, positions_, y_;
};

}  // namespace

std::unique_ptr<Op> make_rope(StepChecker& step) {
    return std::make_unique<Rope>(step);
}

}  // namespace castiron::host
