// linear, gated_linear and their quantized forms.
#include <algorithm>
#include <optional>

#include "device/host/ops/lora.h"
#include "device/host/ops/ops.h"
#include "device/host/ops/products.h"

namespace castiron::host {
namespace {

// First the rows of x are prepared, where the product takes them otherwise than they lie (RoundedRows).
template <typename Product>
class Linear final : public Op {
public:
    Linear(StepChecker& step, bool gated) {
        const bool has_bias = step.flag("has_bias");
        has_residual_ = !gated && step.flag("has_residual");
        const size_t weights = Product::weight_count(step);
        step.expect(has_residual_ ? 2 : 1, weights + size_t{has_bias}, 1);
        x_ = step.input(0);
        y_ = step.output(0);
        sizes_.k = step.matrix(x_, true);
        sizes_.n = step.matrix(y_, false);
        sizes_.gated = gated;
        if (y_.shape[0] != x_.shape[0]) step.fail("input and output have different rows");
        product_.emplace(step, sizes_);
        output_.n = sizes_.n;
        output_.gated = gated;
        if (has_bias) output_.bias = step.vector_weight(weights, {sizes_.bias_size()});
        output_.activation = read_activation(step);
        if (!gated) output_.alpha = static_cast<float>(step.number_or("alpha", 1));
        if (has_residual_) {
            residual_ = step.input(1);
            step.check(residual_, DType::kF32, y_.shape);
            step.finish({{0, 1}});
        } else {
            step.finish();
        }
        lora_.emplace(step, x_, y_);
        rounds_output_ = product_->rounds_output() && !has_residual_ && step.round_output(0);
        const Limits& limits = step.program().limits;
        if (prepares()) {
            rows_ = RoundedRows(product_->row_bytes(),
                                x_.shape[0].bind(limits.max_num_tokens, limits.max_logit_rows));
        }
    }

    // That of the product, rows of this thread's own, and what preparing one takes.
    [[nodiscard]] size_t scratch_floats() const override {
        return product_scratch() + rows_.scratch_floats() + product_->prepare_floats();
    }
    [[nodiscard]] size_t workspace_floats(int) const override { return rows_.workspace_floats(); }
    [[nodiscard]] int phases(const StepContext& context, int) const override {
        const int product = prepares() ? RoundedRows::phases(context.bind(x_.shape[0])) : 1;
        return product + (lora_->active(context) ? 1 : 0);
    }

    void run(const StepContext& context, const Lane& lane, int phase) const override {
        const int64_t rows = context.bind(x_.shape[0]);
        if (rows == 0) return;
        const bool adapted = lora_->active(context);
        if (adapted && phase-- == 0) return lora_->shrink(context, lane);
        ProductTile tile;
        if (prepares()) {
            float* own = lane.scratch + product_scratch();
            const float* x = context.f32(x_);
            tile.x = rows_.take(context.workspace, lane, rows, phase, own, [&](int64_t row, std::byte* to) {
                product_->prepare_row(x + row * x_.row_stride, to, own + rows_.scratch_floats());
            });
            if (tile.x == nullptr) return;
            tile.x_stride = product_->row_bytes();
        } else {
            tile.x = context.rounded(x_);
            tile.x_stride = x_.rounded ? product_->row_bytes() : x_.row_stride * 4;
        }
        LinearOutput output = output_;
        if (rounds_output_) {
            output.rounded = context.rounded(y_);
        } else {
            output.y = context.f32(y_);
        }
        if (has_residual_) output.residual = context.f32(residual_);
        LoraRows lora;
        if (adapted) {
            lora = lora_->rows(context);
            output.lora = &lora;
        }
        const LinearShape shape{.rows = rows,
                                .blocks = sizes_.blocks(),
                                .panels_per_block = sizes_.panels_per_block(),
                                .height = product_->height(),
                                .row_bytes = tile.x_stride};
        for_linear_tiles(context, lane, shape, [&](const LinearTile& part, const WeightsAhead& ahead) {
            tile.part = part;
            tile.ahead = ahead;
            product_->run(output, tile, lane.scratch);
        });
    }

private:
    [[nodiscard]] bool prepares() const { return product_->prepares(x_); }
    // An adapter's shrink takes kLinearScratchFloats.
    [[nodiscard]] size_t product_scratch() const {
        return std::max(kLinearScratchFloats, product_->scratch_floats());
    }

    Operand x_, y_, residual_;
    ProductSizes sizes_;
    std::optional<Product> product_;
    LinearOutput output_;
    std::optional<LoraInput> lora_;
    RoundedRows rows_;
    bool has_residual_ = false;
    bool rounds_output_ = false;  // y is rows of bf16
};

}  // namespace

std::unique_ptr<Op> make_linear(StepChecker& step) {
    return std::make_unique<Linear<FloatProduct>>(step, step.step().kernel == "gated_linear");
}

std::unique_ptr<Op> make_quantized_linear(StepChecker& step) {
    return std::make_unique<Linear<QuantizedProduct>>(step, step.step().kernel == "quantized_gated_linear");
}

}  // namespace castiron::host
