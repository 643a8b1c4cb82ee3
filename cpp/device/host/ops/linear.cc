#include <algorithm>

#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

class Linear final : public Op {
public:
    explicit Linear(StepChecker& step) : kernels_(step.kernels()) {
        const bool gated = step.step().kernel == "gated_linear";
        const bool has_bias = step.flag("has_bias");
        const bool has_residual = !gated && step.flag("has_residual");
        step.expect(has_residual ? 2 : 1, has_bias ? 2 : 1, 1);
        x_ = step.input(0);
        y_ = step.output(0);
        args_.k = step.matrix(x_, true);
        args_.n = step.matrix(y_, false);
        blocks_ = (args_.n + 15) / 16;
        if (y_.shape[0] != x_.shape[0]) step.fail("input and output have different rows");

        const ResolvedWeight& w = step.weight(0);
        if (w.weight->layout == Layout::kPlain || w.weight->shape.size() != 2)
            step.fail("weight '" + w.weight->name + "' must be packed in panels");
        const int64_t expected = gated ? 2 * blocks_ * 16 : args_.n;
        if (w.weight->shape[0] != expected || w.weight->shape[1] != args_.k) {
            step.fail("weight '" + w.weight->name + "' has shape [" + std::to_string(w.weight->shape[0]) +
                      ", " + std::to_string(w.weight->shape[1]) + "], expected [" + std::to_string(expected) +
                      ", " + std::to_string(args_.k) + "]");
        }
        args_.weight = w.data;
        args_.bf16 = w.weight->dtype == DType::kBF16;
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
    }

    [[nodiscard]] size_t scratch_floats() const override { return kLinearScratchFloats; }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const int64_t rows = context.bind(x_.shape[0]);
        if (rows == 0) return;
        LinearArgs args = args_;
        args.x = context.f32(x_);
        args.x_stride = x_.row_stride;
        args.y = context.f32(y_);
        if (has_residual_) args.residual = context.f32(residual_);

        if (rows <= kStreamRows) {
            // Weights stream from memory once: one contiguous run for each thread.
            const auto [begin, end] = lane.share(blocks_);
            for (int64_t block = begin; block < end; block += kMaxLinearBlocks) {
                kernels_.linear(args, 0, rows, block, std::min(block + kMaxLinearBlocks, end), lane.scratch);
            }
            return;
        }
        // Tiles of rows x blocks, handed out as threads come; all row tiles are of about the same height.
        int64_t row_tiles = (rows + kMaxLinearRows - 1) / kMaxLinearRows;
        int64_t chunk = std::clamp<int64_t>(blocks_ / (int64_t{lane.parts} * 8), 1, 4);
        const int64_t chunks = (blocks_ + chunk - 1) / chunk;
        while (row_tiles * chunks < int64_t{lane.parts} * 4 && rows / row_tiles > 24) ++row_tiles;
        for (int64_t tile = context.next(); tile < row_tiles * chunks; tile = context.next()) {
            const int64_t row_tile = tile / chunks, block = tile % chunks * chunk;
            kernels_.linear(args, rows * row_tile / row_tiles, rows * (row_tile + 1) / row_tiles, block,
                            std::min(block + chunk, blocks_), lane.scratch);
        }
    }

private:
    static constexpr int64_t kStreamRows = 6;

    const KernelTable& kernels_;
    Operand x_, y_, residual_;
    LinearArgs args_;
    int64_t blocks_ = 0;
    bool has_residual_ = false;
};

}  // namespace

std::unique_ptr<Op> make_linear(StepChecker& step) {
    return std::make_unique<Linear>(step);
}

}  // namespace castiron::host
