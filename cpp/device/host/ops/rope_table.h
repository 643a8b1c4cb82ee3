// The cos and sin tables of a rope step and their attributes.
#pragma once

#include "device/host/op.h"
#include "device/host/step_checker.h"

namespace castiron::host {

class RopeTable {
public:
    // Reads rotary_dim, interleaved and concat_halves, and weights 0 and 1: cos and sin [P, rotary_dim / 2].
    RopeTable(StepChecker& step, int64_t head_dim) {
        const int64_t rotary = step.integer("rotary_dim", 2, head_dim);
        if (rotary % 2 != 0) step.fail("rotary_dim " + std::to_string(rotary) + " is odd");
        const std::vector<int64_t>& shape = step.weight(0).weight->shape;
        if (shape.size() != 2 || shape[1] != rotary / 2)
            step.fail("the cos table must be [positions, rotary_dim / 2]");
        positions_ = shape[0];
        half_ = rotary / 2;
        cos_ = step.vector_weight(0, {positions_, half_});
        sin_ = step.vector_weight(1, {positions_, half_});
        args_.head_dim = static_cast<int>(head_dim);
        args_.rotary_dim = static_cast<int>(rotary);
        args_.interleaved = step.flag("interleaved");
        args_.concat_halves = step.flag("concat_halves");
    }

    // Rotates one token's heads; x may be y. A position outside the tables is reported and leaves y unrotated
    // by position 0, never read out of bounds.
    void rotate(const StepContext& context, const KernelTable& kernels, int64_t heads, int64_t position,
                const float* x, float* y, float* scratch) const {
        if (position < 0 || position >= positions_) {
            context.report("rope: a position is outside the cos and sin tables");
            position = 0;
        }
        RopeArgs args = args_;
        args.heads = static_cast<int>(heads);
        kernels.rope(args, x, y, cos_ + position * half_, sin_ + position * half_, scratch);
    }

    [[nodiscard]] size_t scratch_floats() const { return static_cast<size_t>(args_.rotary_dim); }

private:
    const float* cos_ = nullptr;
    const float* sin_ = nullptr;
    int64_t positions_ = 0, half_ = 0;
    RopeArgs args_;
};

}  // namespace castiron::host
