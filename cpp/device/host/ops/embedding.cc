#include <bit>
#include <cstring>

#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

class Embedding final : public Op {
public:
    explicit Embedding(StepChecker& step) : kernels_(step.kernels()) {
        step.expect(1, 1, 1);
        ids_ = step.input(0);
        out_ = step.output(0);
        const ResolvedWeight& table = step.weight(0);
        if (table.weight->shape.size() != 2) step.fail("the table must be a matrix");
        vocab_ = table.weight->shape[0];
        width_ = table.weight->shape[1];
        data_ = table.data;
        layout_ = table.weight->layout;
        bf16_ = table.weight->dtype == DType::kBF16;
        if (!bf16_ && table.weight->dtype != DType::kF32) step.fail("the table must be of f32 or bf16");
        if (ids_.shape.size() != 1) step.fail("ids must have one axis");
        step.check(ids_, DType::kI32, ids_.shape);
        step.check(out_, DType::kF32, {ids_.shape[0], Dim{width_}});
        scale_ = static_cast<float>(step.number_or("scale", 1));
        index_offset_ = step.integer_or("index_offset", 0, -(int64_t{1} << 31), int64_t{1} << 31);
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const auto [begin, end] = lane.share(context.bind(ids_.shape[0]));
        const int32_t* ids = context.i32(ids_);
        float* out = context.f32(out_);
        for (int64_t t = begin; t < end; ++t) {
            const int64_t row = int64_t{ids[t]} + index_offset_;
            float* to = out + t * width_;
            if (row < 0 || row >= vocab_) {
                context.report("embedding: a token id or position is outside the table");
                std::memset(to, 0, static_cast<size_t>(width_) * 4);
                continue;
            }
            copy_row(row, to);
        }
    }

private:
    void copy_row(int64_t row, float* to) const {
        const int64_t panel = row / 16, lane = row % 16;
        switch (layout_) {
            case Layout::kPlain:
                if (bf16_) {
                    kernels_.scale_bf16(reinterpret_cast<const uint16_t*>(data_) + row * width_, to, width_,
                                        scale_);
                } else {
                    const float* from = reinterpret_cast<const float*>(data_) + row * width_;
                    for (int64_t i = 0; i < width_; ++i) to[i] = from[i] * scale_;
                }
                return;
            case Layout::kPanel16: {
                const float* from = reinterpret_cast<const float*>(data_) + panel * width_ * 16 + lane;
                for (int64_t i = 0; i < width_; ++i) to[i] = from[i * 16] * scale_;
                return;
            }
            case Layout::kPanel16x2: {
                const int64_t pairs = (width_ + 1) / 2;
                const auto* from = reinterpret_cast<const uint16_t*>(data_) + panel * pairs * 32 + lane * 2;
                for (int64_t i = 0; i < width_; ++i) {
                    const uint32_t bits = static_cast<uint32_t>(from[i / 2 * 32 + i % 2]) << 16;
                    to[i] = std::bit_cast<float>(bits) * scale_;
                }
                return;
            }
            default:
                return;  // codes: refused above
        }
    }

    const KernelTable& kernels_;
    Operand ids_, out_;
    const std::byte* data_ = nullptr;
    int64_t vocab_ = 0, width_ = 0, index_offset_ = 0;
    Layout layout_ = Layout::kPlain;
    bool bf16_ = false;
    float scale_ = 1;
};

}  // namespace

std::unique_ptr<Op> make_embedding(StepChecker& step) {
    return std::make_unique<Embedding>(step);
}

}  // namespace castiron::host
