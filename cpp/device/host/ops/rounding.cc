#include "device/host/ops/rounding.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

// y = what rounding leaves of x, in float32.
class Round final : public Op {
public:
    explicit Round(StepChecker& step) : kernels_(step.kernels()) {
        step.expect(1, 0, 1);
        x_ = step.input(0);
        y_ = step.output(0);
        const int64_t k = step.matrix(x_, true);
        step.check(y_, DType::kF32, x_.shape);
        rounding_ = read_rounding(step, k);
        if (rounding_.format == XFormat::kInt8) rounding_.format = XFormat::kInt8Floats;
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        const auto [begin, end] = lane.share(context.bind(x_.shape[0]));
        for (int64_t row = begin; row < end; ++row) {
            kernels_.round_row(rounding_, context.f32(x_) + row * x_.row_stride,
                               reinterpret_cast<std::byte*>(context.f32(y_) + row * rounding_.k));
        }
    }

private:
    const KernelTable& kernels_;
    Operand x_, y_;
    Rounding rounding_;
};

}  // namespace

Rounding read_rounding(StepChecker& step, int64_t k) {
    static constexpr std::pair<const char*, XFormat> kFormats[] = {
        {"float", XFormat::kFloat}, {"int8", XFormat::kInt8},   {"fp8", XFormat::kFp8},
        {"nvfp4", XFormat::kNvfp4}, {"mxfp4", XFormat::kMxfp4}, {"mxfp8", XFormat::kMxfp8}};
    const std::string name = step.text("x_format");
    const auto* found = std::find_if(std::begin(kFormats), std::end(kFormats),
                                     [&](const auto& format) { return name == format.first; });
    if (found == std::end(kFormats)) step.fail("unknown x_format '" + name + "'");
    Rounding r;
    r.format = found->second;
    r.k = r.step = k;
    const int64_t group = step.integer_or("x_group", 0, 0, int64_t{1} << 40);
    r.group = group > 0 ? std::min(group, k) : k;
    if (r.format == XFormat::kNvfp4) r.group = 16;
    if (r.format == XFormat::kMxfp4 || r.format == XFormat::kMxfp8) r.group = 32;
    r.scale = static_cast<float>(step.number_or("x_scale", 0));
    if (r.scale < 0) step.fail("x_scale is negative");
    return r;
}

std::unique_ptr<Op> make_round(StepChecker& step) {
    return std::make_unique<Round>(step);
}

}  // namespace castiron::host
