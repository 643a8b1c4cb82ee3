#include "device/host/ops/products.h"

#include <cstring>
#include <string>

#include "device/host/ops/rounding.h"

namespace castiron::host {
namespace {

// Integer sums stay within int32 and within what a float counts.
constexpr int64_t kMaxIntegerInputs = 65536;

void check_shape(StepChecker& step, const ResolvedWeight& w, int64_t rows, int64_t columns) {
    if (w.weight->shape == std::vector<int64_t>{rows, columns}) return;
    std::string found;
    for (const int64_t d : w.weight->shape) found += (found.empty() ? "" : ", ") + std::to_string(d);
    step.fail("weight '" + w.weight->name + "' has shape [" + found + "], expected [" + std::to_string(rows) +
              ", " + std::to_string(columns) + "]");
}

// Column j of the codes multiplies x[columns[j]]. The data is read once it is there: weights are copied after
// the ops are made, so that the program's own is checked.
const int32_t* read_columns(StepChecker& step, size_t index, int64_t k) {
    const ResolvedWeight& w = step.weight(index);
    if (w.weight->dtype != DType::kI32 || w.weight->layout != Layout::kPlain ||
        w.weight->shape != std::vector<int64_t>{k}) {
        step.fail("weight '" + w.weight->name + "' must be plain i32 of shape [" + std::to_string(k) + "]");
    }
    const auto* columns = reinterpret_cast<const int32_t*>(w.weight->data);
    for (int64_t i = 0; i < k; ++i) {
        if (columns[i] < 0 || columns[i] >= k) {
            step.fail("weight '" + w.weight->name + "' names column " + std::to_string(columns[i]) + " of " +
                      std::to_string(k));
        }
    }
    return reinterpret_cast<const int32_t*>(w.data);
}

}  // namespace

FloatProduct::FloatProduct(StepChecker& step, const ProductSizes& sizes)
    : kernels_(step.kernels()), sizes_(sizes) {
    const std::string x_format = step.text_or("x_format", "auto");
    if (x_format != "auto" && x_format != "float")
        step.fail("unknown x_format '" + x_format + "': expected auto or float");
    const ResolvedWeight& w = step.weight(0);
    stored_bf16_ = w.weight->layout == Layout::kPanel16x2;
    if (!stored_bf16_ && (w.weight->layout != Layout::kPanel16 || w.weight->dtype != DType::kF32))
        step.fail("weight '" + w.weight->name + "' must be packed in panels of f32 or bf16");
    check_shape(step, w, sizes.experts * sizes.weight_rows(), sizes.k);
    weight_ = w.data;
    panel_bytes_ = (stored_bf16_ ? (sizes.k + 1) / 2 : sizes.k) * 64;
    bf16_ = stored_bf16_ && kernels_.bf16.product != nullptr && x_format == "auto";
}

void FloatProduct::prepare_row(const float* x, std::byte* row, float*) const {
    if (bf16_) return kernels_.bf16.round_row(x, sizes_.k, row);
    std::memcpy(row, x, static_cast<size_t>(sizes_.k) * sizeof(float));
}

void FloatProduct::run(const LinearOutput& output, const ProductTile& t, float* scratch) const {
    const LinearTile& part = t.part;
    const std::byte* weight = weight_ + t.expert * sizes_.panels() * panel_bytes_;
    if (bf16_) {
        const Bf16Args args{
            .x = t.x, .x_stride = t.x_stride, .weight = weight, .k = sizes_.k, .gated = sizes_.gated};
        kernels_.bf16.product(args, part.row_begin, part.row_end, part.block_begin, part.block_end, scratch,
                              t.ahead);
        const auto finish = output.rounded != nullptr ? kernels_.bf16.output : kernels_.linear_output;
        return finish(output, part.row_begin, part.row_end, part.block_begin, part.block_end, scratch);
    }
    LinearArgs args{output};
    args.x = reinterpret_cast<const float*>(t.x);
    args.x_stride = t.x_stride / 4;
    args.weight = weight;
    args.bf16 = stored_bf16_;
    args.k = sizes_.k;
    kernels_.linear(args, part.row_begin, part.row_end, part.block_begin, part.block_end, scratch, t.ahead);
}

QuantizedProduct::QuantizedProduct(StepChecker& step, const ProductSizes& sizes)
    : kernels_(step.kernels()), sizes_(sizes) {
    read_weight(step);
    rounding_ = read_rounding(step, sizes.k);
    choose_product();
    if (step.flag("has_columns")) columns_ = read_columns(step, step.flag("has_offsets") ? 3 : 2, sizes.k);
}

void QuantizedProduct::read_weight(StepChecker& step) {
    const ResolvedWeight& codes = step.weight(0);
    switch (codes.weight->dtype) {
        case DType::kI8:
            weight_.format = Codes::kInt8;
            break;
        case DType::kI4:
            weight_.format = Codes::kInt4;
            break;
        case DType::kF8E4M3:
            weight_.format = Codes::kFp8;
            break;
        case DType::kF4E2M1:
            weight_.format = Codes::kFp4;
            break;
        default:
            step.fail("weight '" + codes.weight->name + "' must be codes: i8, i4, f8e4m3 or f4e2m1");
    }
    const int64_t rows = sizes_.experts * sizes_.weight_rows();
    check_shape(step, codes, rows, sizes_.k);
    weight_.codes = codes.data;
    weight_.k = sizes_.k;
    const int64_t group = step.integer("group", 0, int64_t{1} << 40);
    weight_.group = group > 0 ? std::min(group, sizes_.k) : sizes_.k;
    weight_.half_scales = step.weight(1).weight->dtype == DType::kF16;
    for (size_t i = 1; i < (step.flag("has_offsets") ? 3u : 2u); ++i) {
        const ResolvedWeight& scales = step.weight(i);
        check_shape(step, scales, rows, weight_.groups());
        if (scales.weight->layout != Layout::kPanel16) step.fail("scales and offsets lie in panel16");
        if (weight_.half_scales != (scales.weight->dtype == DType::kF16)) {
            step.fail("scales and offsets must be of one dtype");
        }
        (i == 1 ? weight_.scales : weight_.offsets) = scales.data;
    }
}

// Codes of both operands multiply as integers where sums can run over the smaller of the two groups; else x
// becomes float again.
void QuantizedProduct::choose_product() {
    Rounding& r = rounding_;
    if (r.format != XFormat::kInt8) return;
    const int64_t small = std::min(r.group, weight_.group), large = std::max(r.group, weight_.group);
    if (weight_.format == Codes::kFp8 || r.k > kMaxIntegerInputs || (large < r.k && large % small != 0) ||
        (small < r.k && small % 4 != 0)) {
        r.format = XFormat::kInt8Floats;
        return;
    }
    r.step = small;
    kernels_.integers.set_sums(weight_.format, r);
}

void QuantizedProduct::prepare_row(const float* x, std::byte* row, float* scratch) const {
    if (columns_ != nullptr) {
        for (int64_t i = 0; i < rounding_.k; ++i) scratch[i] = x[columns_[i]];
        x = scratch;
    }
    kernels_.round_row(rounding_, x, row);
}

void QuantizedProduct::run(const LinearOutput& output, const ProductTile& t, float* scratch) const {
    const LinearTile& part = t.part;
    QuantizedArgs args{
        .weight = weight_, .rounding = rounding_, .x = t.x, .x_stride = t.x_stride, .gated = sizes_.gated};
    const int64_t panels = t.expert * sizes_.panels();
    args.weight.codes += panels * weight_.panel_bytes();
    args.weight.scales += panels * weight_.scale_panel_bytes();
    if (weight_.offsets != nullptr) args.weight.offsets += panels * weight_.scale_panel_bytes();
    float* between = scratch + kLinearSumFloats;
    if (integers()) {
        kernels_.integers.product(args, part.row_begin, part.row_end, part.block_begin, part.block_end,
                                  scratch, reinterpret_cast<std::byte*>(between), t.ahead);
    } else {
        kernels_.dequantized_product(args, part.row_begin, part.row_end, part.block_begin, part.block_end,
                                     scratch, between);
    }
    kernels_.linear_output(output, part.row_begin, part.row_end, part.block_begin, part.block_end, scratch);
}

}  // namespace castiron::host
