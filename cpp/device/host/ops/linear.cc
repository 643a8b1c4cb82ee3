#include <algorithm>
#include <optional>

#include "device/host/ops/linear_tiles.h"
#include "device/host/ops/lora.h"
#include "device/host/ops/ops.h"
#include "device/host/ops/rounded_rows.h"

namespace castiron::host {
namespace {

class Linear final : public Op {
public:
    explicit Linear(StepChecker& step) : kernels_(step.kernels()) {
        const bool gated = step.step().kernel == "gated_linear";
        const bool has_bias = step.flag("has_bias");
        const std::string x_format = step.text_or("x_format", "auto");
        if (x_format != "auto" && x_format != "float")
            step.fail("unknown x_format '" + x_format + "': expected auto or float");
        const bool has_residual = !gated && step.flag("has_residual");
        step.expect(has_residual ? 2 : 1, has_bias ? 2 : 1, 1);
        x_ = step.input(0);
        y_ = step.output(0);
        args_.k = step.matrix(x_, true);
        args_.n = step.matrix(y_, false);
        blocks_ = (args_.n + 15) / 16;
        if (y_.shape[0] != x_.shape[0]) step.fail("input and output have different rows");

        const ResolvedWeight& w = step.weight(0);
        const bool bf16 = w.weight->layout == Layout::kPanel16x2;
        if (!bf16 && (w.weight->layout != Layout::kPanel16 || w.weight->dtype != DType::kF32))
            step.fail("weight '" + w.weight->name + "' must be packed in panels of f32 or bf16");
        const int64_t expected = gated ? 2 * blocks_ * 16 : args_.n;
        if (w.weight->shape[0] != expected || w.weight->shape[1] != args_.k) {
            step.fail("weight '" + w.weight->name + "' has shape [" + std::to_string(w.weight->shape[0]) +
                      ", " + std::to_string(w.weight->shape[1]) + "], expected [" + std::to_string(expected) +
                      ", " + std::to_string(args_.k) + "]");
        }
        bf16_ = bf16 && kernels_.bf16.product != nullptr && x_format == "auto";
        args_.weight = w.data;
        args_.bf16 = bf16;
        args_.gated = gated;
        if (has_bias) args_.bias = step.vector_weight(1, {expected});
        args_.activation = read_activation(step);
        if (!gated) args_.alpha = static_cast<float>(step.number_or("alpha", 1));
        has_residual_ = has_residual;
        if (has_residual) {
            residual_ = step.input(1);
            step.check(residual_, DType::kF32, y_.shape);
            step.finish({{0, 1}});
        } else {
            step.finish();
        }
        lora_.emplace(step, x_, y_);
        rounds_output_ = bf16_ && !has_residual && step.round_output(0);
        const Limits& limits = step.program().limits;
        if (rounds_input()) {
            rounded_ = RoundedRows(bf16_row_bytes(args_.k),
                                   x_.shape[0].bind(limits.max_num_tokens, limits.max_logit_rows));
        }
    }

    [[nodiscard]] size_t scratch_floats() const override {
        return std::max(kLinearScratchFloats, kLinearSumFloats + rounded_.scratch_floats());
    }
    [[nodiscard]] size_t workspace_floats(int) const override { return rounded_.workspace_floats(); }
    [[nodiscard]] int phases(const StepContext& context, int) const override {
        const int product = rounds_input() ? RoundedRows::phases(context.bind(x_.shape[0])) : 1;
        return product + (lora_->active(context) ? 1 : 0);
    }

    void run(const StepContext& context, const Lane& lane, int phase) const override {
        const int64_t rows = context.bind(x_.shape[0]);
        if (rows == 0) return;
        const bool adapted = lora_->active(context);
        if (adapted && phase-- == 0) return lora_->shrink(context, lane);
        LinearArgs args = args_;
        args.x = context.f32(x_);
        args.x_stride = x_.row_stride;
        if (rounds_output_) {
            args.rounded = context.rounded(y_);
        } else {
            args.y = context.f32(y_);
        }
        if (has_residual_) args.residual = context.f32(residual_);
        LoraRows lora;
        if (adapted) {
            lora = lora_->rows(context);
            args.lora = &lora;
        }
        if (bf16_) return run_bf16(context, lane, phase, args, rows);

        for_linear_tiles(context, lane, {.rows = rows, .blocks = blocks_},
                         [&](int64_t row_begin, int64_t row_end, int64_t block_begin, int64_t block_end,
                             const WeightsAhead& ahead) {
                             kernels_.linear(args, row_begin, row_end, block_begin, block_end, lane.scratch,
                                             ahead);
                         });
    }

private:
    [[nodiscard]] bool rounds_input() const { return bf16_ && !x_.rounded; }

    // Both operands as bf16.
    void run_bf16(const StepContext& context, const Lane& lane, int phase, const LinearArgs& args,
                  int64_t rows) const {
        float* sums = lane.scratch;
        Bf16Args product{.weight = args.weight, .k = args.k, .gated = args.gated};
        product.x_stride = bf16_row_bytes(args.k);
        product.x = x_.rounded
                        ? context.rounded(x_)
                        : rounded_.take(context, lane, rows, phase, sums + kLinearSumFloats,
                                        [&](int64_t row, std::byte* to) {
                                            kernels_.bf16.round_row(args.x + row * args.x_stride, args.k, to);
                                        });
        if (product.x == nullptr) return;
        const LinearShape shape{.rows = rows,
                                .blocks = blocks_,
                                .panels_per_block = args.gated ? 2 : 1,
                                .height = kernels_.bf16.height,
                                .row_bytes = product.x_stride};
        const auto output = rounds_output_ ? kernels_.bf16.output : kernels_.linear_output;
        for_linear_tiles(context, lane, shape,
                         [&](int64_t row_begin, int64_t row_end, int64_t block_begin, int64_t block_end,
                             const WeightsAhead& ahead) {
                             kernels_.bf16.product(product, row_begin, row_end, block_begin, block_end, sums,
                                                   ahead);
                             output(args, row_begin, row_end, block_begin, block_end, sums);
                         });
    }

    const KernelTable& kernels_;
    Operand x_, y_, residual_;
    LinearArgs args_;
    std::optional<LoraInput> lora_;
    RoundedRows rounded_;
    bool bf16_ = false;           // whether both operands are multiplied as bf16
    bool rounds_output_ = false;  // whether y is rows of bf16
    int64_t blocks_ = 0;
    bool has_residual_ = false;
};

}  // namespace

std::unique_ptr<Op> make_linear(StepChecker& step) {
    return std::make_unique<Linear>(step);
}

}  // namespace castiron::host
