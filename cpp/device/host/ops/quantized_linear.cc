#include <algorithm>
#include <optional>
#include <utility>

#include "device/host/ops/linear_tiles.h"
#include "device/host/ops/lora.h"
#include "device/host/ops/ops.h"
#include "device/host/ops/rounded_rows.h"
#include "device/host/ops/rounding.h"

namespace castiron::host {
namespace {

// Integer sums stay within int32 and within what a float counts.
constexpr int64_t kMaxIntegerInputs = 65536;

// Products with weights that are codes. First the rows of x are rounded (and their columns gathered), into
// memory that all threads share; few rows are rounded by every thread for itself, which costs less than
// meeting.
class QuantizedLinear final : public Op {
public:
    explicit QuantizedLinear(StepChecker& step) : kernels_(step.kernels()) {
        const bool gated = step.step().kernel == "quantized_gated_linear";
        const bool has_offsets = step.flag("has_offsets"), has_columns = step.flag("has_columns");
        const bool has_bias = step.flag("has_bias");
        has_residual_ = !gated && step.flag("has_residual");
        step.expect(has_residual_ ? 2 : 1, 2 + size_t{has_offsets} + size_t{has_columns} + size_t{has_bias},
                    1);
        x_ = step.input(0);
        y_ = step.output(0);
        const int64_t k = step.matrix(x_, true);
        output_.n = step.matrix(y_, false);
        output_.gated = args_.gated = gated;
        blocks_ = (output_.n + 15) / 16;
        if (y_.shape[0] != x_.shape[0]) step.fail("input and output have different rows");
        const int64_t outputs = gated ? 2 * blocks_ * 16 : output_.n;
        read_weight(step, outputs, k, has_offsets);
        args_.rounding = read_rounding(step, k);
        choose_product();

        size_t next = has_offsets ? 3 : 2;
        if (has_columns) columns_ = read_columns(step, next++, k);
        if (has_bias) output_.bias = step.vector_weight(next, {outputs});
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
        const Limits& limits = step.program().limits;
        if (rounds()) {
            rounded_ = RoundedRows(args_.rounding.row_bytes(),
                                   x_.shape[0].bind(limits.max_num_tokens, limits.max_logit_rows));
        }
    }

    [[nodiscard]] size_t scratch_floats() const override {
        return kLinearSumFloats + between_floats() + rounded_.scratch_floats() + gathered_floats();
    }
    [[nodiscard]] size_t workspace_floats(int) const override { return rounded_.workspace_floats(); }
    [[nodiscard]] int phases(const StepContext& context, int) const override {
        const int product = rounds() ? RoundedRows::phases(context.bind(x_.shape[0])) : 1;
        return product + (lora_->active(context) ? 1 : 0);
    }

    void run(const StepContext& context, const Lane& lane, int phase) const override {
        const int64_t rows = context.bind(x_.shape[0]);
        if (rows == 0) return;
        const bool adapted = lora_->active(context);
        if (adapted && phase-- == 0) return lora_->shrink(context, lane);
        QuantizedArgs args = args_;
        if (!rounds()) {
            args.x = reinterpret_cast<const std::byte*>(context.f32(x_));
            args.x_stride = x_.row_stride * 4;
        } else {
            args.x = rounded_.take(context, lane, rows, phase, own_rows(lane),
                                   [&](int64_t row, std::byte* to) { round(context, lane, row, to); });
            if (args.x == nullptr) return;
            args.x_stride = rounded_.row_bytes();
        }
        LoraRows lora;
        LinearOutput output = output_;
        if (adapted) {
            lora = lora_->rows(context);
            output.lora = &lora;
        }
        output.y = context.f32(y_);
        if (has_residual_) output.residual = context.f32(residual_);
        float* sums = lane.scratch;
        float* between = lane.scratch + kLinearSumFloats;
        const bool integers = args.rounding.format == XFormat::kInt8;
        const LinearShape shape{.rows = rows,
                                .blocks = blocks_,
                                .panels_per_block = args.gated ? 2 : 1,
                                .height = integers ? kernels_.integers.height : 1,
                                .row_bytes = args.x_stride};
        for_linear_tiles(context, lane, shape,
                         [&](int64_t row_begin, int64_t row_end, int64_t block_begin, int64_t block_end,
                             const WeightsAhead& ahead) {
                             if (integers) {
                                 kernels_.integers.product(args, row_begin, row_end, block_begin, block_end,
                                                           sums, reinterpret_cast<std::byte*>(between),
                                                           ahead);
                             } else {
                                 kernels_.dequantized_product(args, row_begin, row_end, block_begin,
                                                              block_end, sums, between);
                             }
                             kernels_.linear_output(output, row_begin, row_end, block_begin, block_end, sums);
                         });
    }

private:
    // Whether the product reads something else than x as it is.
    [[nodiscard]] bool rounds() const {
        return args_.rounding.format != XFormat::kFloat || columns_ != nullptr;
    }
    [[nodiscard]] size_t between_floats() const {
        return std::max(static_cast<size_t>(kLinearWideFloats), 2 * unpacked_floats(args_.rounding.k));
    }
    [[nodiscard]] size_t gathered_floats() const {
        return columns_ == nullptr ? 0 : static_cast<size_t>(args_.rounding.k);
    }
    [[nodiscard]] float* own_rows(const Lane& lane) const {
        return lane.scratch + kLinearSumFloats + between_floats();
    }

    void round(const StepContext& context, const Lane& lane, int64_t row, std::byte* rounded) const {
        const float* x = context.f32(x_) + row * x_.row_stride;
        if (columns_ != nullptr) {
            float* gathered = own_rows(lane) + rounded_.scratch_floats();
            for (int64_t i = 0; i < args_.rounding.k; ++i) gathered[i] = x[columns_[i]];
            x = gathered;
        }
        kernels_.round_row(args_.rounding, x, rounded);
    }

    void read_weight(StepChecker& step, int64_t outputs, int64_t k, bool has_offsets) {
        const ResolvedWeight& codes = step.weight(0);
        QuantizedWeight& w = args_.weight;
        switch (codes.weight->dtype) {
            case DType::kI8:
                w.format = Codes::kInt8;
                break;
            case DType::kI4:
                w.format = Codes::kInt4;
                break;
            case DType::kF8E4M3:
                w.format = Codes::kFp8;
                break;
            case DType::kF4E2M1:
                w.format = Codes::kFp4;
                break;
            default:
                step.fail("weight '" + codes.weight->name + "' must be codes: i8, i4, f8e4m3 or f4e2m1");
        }
        check_shape(step, codes, outputs, k);
        w.codes = codes.data;
        w.k = k;
        const int64_t group = step.integer("group", 0, int64_t{1} << 40);
        w.group = group > 0 ? std::min(group, k) : k;
        w.half_scales = step.weight(1).weight->dtype == DType::kF16;
        for (size_t i = 1; i < (has_offsets ? 3u : 2u); ++i) {
            const ResolvedWeight& scales = step.weight(i);
            check_shape(step, scales, outputs, w.groups());
            if (scales.weight->layout != Layout::kPanel16) step.fail("scales and offsets lie in panel16");
            if (w.half_scales != (scales.weight->dtype == DType::kF16)) {
                step.fail("scales and offsets must be of one dtype");
            }
            (i == 1 ? w.scales : w.offsets) = scales.data;
        }
    }

    // Codes of both operands multiply as integers where sums can run over the smaller of the two groups; else
    // x becomes float again.
    void choose_product() {
        Rounding& r = args_.rounding;
        const QuantizedWeight& w = args_.weight;
        if (r.format != XFormat::kInt8) return;
        const int64_t small = std::min(r.group, w.group), large = std::max(r.group, w.group);
        if (w.format == Codes::kFp8 || r.k > kMaxIntegerInputs || (large < r.k && large % small != 0) ||
            (small < r.k && small % 4 != 0)) {
            r.format = XFormat::kInt8Floats;
            return;
        }
        r.step = small;
        kernels_.integers.set_sums(w.format, r);
    }

    void check_shape(StepChecker& step, const ResolvedWeight& w, int64_t rows, int64_t columns) const {
        if (w.weight->shape == std::vector<int64_t>{rows, columns}) return;
        std::string found;
        for (const int64_t d : w.weight->shape) found += (found.empty() ? "" : ", ") + std::to_string(d);
        step.fail("weight '" + w.weight->name + "' has shape [" + found + "], expected [" +
                  std::to_string(rows) + ", " + std::to_string(columns) + "]");
    }

    // Column j of the codes multiplies x[columns[j]]. The data is read once it is there: weights are copied
    // after the ops are made, so that the program's own is checked.
    const int32_t* read_columns(StepChecker& step, size_t index, int64_t k) const {
        const ResolvedWeight& w = step.weight(index);
        if (w.weight->dtype != DType::kI32 || w.weight->layout != Layout::kPlain ||
            w.weight->shape != std::vector<int64_t>{k}) {
            step.fail("weight '" + w.weight->name + "' must be plain i32 of shape [" + std::to_string(k) +
                      "]");
        }
        const auto* columns = reinterpret_cast<const int32_t*>(w.weight->data);
        for (int64_t i = 0; i < k; ++i) {
            if (columns[i] < 0 || columns[i] >= k) {
                step.fail("weight '" + w.weight->name + "' names column " + std::to_string(columns[i]) +
                          " of " + std::to_string(k));
            }
        }
        return reinterpret_cast<const int32_t*>(w.data);
    }

    const KernelTable& kernels_;
    Operand x_, y_, residual_;
    QuantizedArgs args_;
    LinearOutput output_;
    std::optional<LoraInput> lora_;
    const int32_t* columns_ = nullptr;
    RoundedRows rounded_;
    int64_t blocks_ = 0;
    bool has_residual_ = false;
};

}  // namespace

std::unique_ptr<Op> make_quantized_linear(StepChecker& step) {
    return std::make_unique<QuantizedLinear>(step);
}

}  // namespace castiron::host
