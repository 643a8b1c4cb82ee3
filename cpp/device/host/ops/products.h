// Rows times a weight: what linear ops (linear.cc) and those of experts (expert_linear.cc) have in common. A
// product reads its weight and attributes from a step, says how it takes rows of x, and computes one tile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device/host/ops/linear_tiles.h"
#include "device/host/ops/rounded_rows.h"
#include "device/host/step_checker.h"

namespace castiron::host {

// Sizes of one weight [panels · 16, k]: those of several experts lie one behind the other.
struct ProductSizes {
    int64_t n = 0;  // outputs of an expert
    int64_t k = 0;
    int64_t experts = 1;
    bool gated = false;

    // Panels of 16 output columns, or pairs of panels.
    [[nodiscard]] int64_t blocks() const { return (n + 15) / 16; }
    [[nodiscard]] int64_t panels_per_block() const { return gated ? 2 : 1; }
    [[nodiscard]] int64_t panels() const { return blocks() * panels_per_block(); }
    // Rows of an expert's weight, and of the bias of all experts.
    [[nodiscard]] int64_t weight_rows() const { return gated || experts > 1 ? panels() * 16 : n; }
    [[nodiscard]] int64_t bias_size() const { return experts * (gated ? panels() * 16 : n); }
};

// One call of a product: a tile of x by the weight of one expert.
struct ProductTile {
    const std::byte* x = nullptr;
    int64_t x_stride = 0;  // bytes
    int64_t expert = 0;
    LinearTile part;
    WeightsAhead ahead;
};

// A weight of float32 or bf16.
class FloatProduct {
public:
    FloatProduct(StepChecker& step, const ProductSizes& sizes);

    [[nodiscard]] static size_t weight_count(StepChecker&) { return 1; }
    // Whether rows have to be prepared (of float32; a value that is bf16 already is taken as it is).
    [[nodiscard]] bool prepares(const Operand& x) const { return bf16_ && !x.rounded; }
    [[nodiscard]] int64_t row_bytes() const {
        return bf16_ ? bf16_row_bytes(sizes_.k) : (sizes_.k * 4 + 63) / 64 * 64;
    }
    void prepare_row(const float* x, std::byte* row, float* scratch) const;
    [[nodiscard]] size_t prepare_floats() const { return 0; }
    // Whether y may be rows of bf16.
    [[nodiscard]] bool rounds_output() const { return bf16_; }
    [[nodiscard]] int64_t height() const { return bf16_ ? kernels_.bf16.height : 1; }
    [[nodiscard]] size_t scratch_floats() const { return kLinearScratchFloats; }
    void run(const LinearOutput& output, const ProductTile& tile, float* scratch) const;

private:
    const KernelTable& kernels_;
    ProductSizes sizes_;
    const std::byte* weight_ = nullptr;
    bool stored_bf16_ = false;
    bool bf16_ = false;  // both operands are multiplied as bf16
    int64_t panel_bytes_ = 0;
};

// A weight of codes and scales, and rows as its arithmetic takes them.
class QuantizedProduct {
public:
    QuantizedProduct(StepChecker& step, const ProductSizes& sizes);

    [[nodiscard]] static size_t weight_count(StepChecker& step) {
        return 2 + size_t{step.flag("has_offsets")} + size_t{step.flag("has_columns")};
    }
    [[nodiscard]] bool prepares(const Operand&) const {
        return rounding_.format != XFormat::kFloat || columns_ != nullptr;
    }
    [[nodiscard]] int64_t row_bytes() const { return rounding_.row_bytes(); }
    // scratch: prepare_floats, for rows whose columns are gathered.
    void prepare_row(const float* x, std::byte* row, float* scratch) const;
    [[nodiscard]] size_t prepare_floats() const {
        return columns_ == nullptr ? 0 : static_cast<size_t>(rounding_.k);
    }
    [[nodiscard]] bool rounds_output() const { return false; }
    [[nodiscard]] int64_t height() const { return integers() ? kernels_.integers.height : 1; }
    [[nodiscard]] size_t scratch_floats() const { return kLinearSumFloats + between_floats(); }
    void run(const LinearOutput& output, const ProductTile& tile, float* scratch) const;

private:
    void read_weight(StepChecker& step);
    void choose_product();
    [[nodiscard]] bool integers() const { return rounding_.format == XFormat::kInt8; }
    // What a call holds between codes and sums: codes as bytes, or a block of weights as float32.
    [[nodiscard]] size_t between_floats() const {
        return std::max(static_cast<size_t>(kLinearWideFloats), 2 * unpacked_floats(rounding_.k));
    }

    const KernelTable& kernels_;
    ProductSizes sizes_;
    QuantizedWeight weight_;
    Rounding rounding_;
    const int32_t* columns_ = nullptr;
};

}  // namespace castiron::host
