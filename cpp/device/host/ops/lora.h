// What adapters add to a product, as its op sees it: shared by linear and quantized_linear.
#pragma once

#include <cstdint>

#include "device/host/op.h"
#include "device/host/step_checker.h"

namespace castiron::host {

// x · aᵀ of every row that has an adapter is computed first, into memory that all threads share; the product
// then adds b to its sums. Both are one chain for each output, so a row's result never depends on its
// neighbours.
class LoraInput {
public:
    // x, y: input and output of the step. Checks the step's modules.
    LoraInput(StepChecker& step, const Operand& x, const Operand& y);

    // Whether any row of this step may have something to add.
    [[nodiscard]] bool active(const StepContext& context) const {
        return adaptable_ && context.token_adapters != nullptr;
    }
    // A phase before that of the product. Lane::scratch must have kLinearScratchFloats.
    void shrink(const StepContext& context, const Lane& lane) const;
    [[nodiscard]] LoraRows rows(const StepContext& context) const;

private:
    [[nodiscard]] const LoraStep* const* adapters(const StepContext& context) const {
        return x_.shape[0].value == Dim::kTokens ? context.token_adapters : context.row_adapters;
    }

    const KernelTable& kernels_;
    Operand x_;
    size_t step_;
    bool adaptable_;
};

}  // namespace castiron::host
