#include "device/host/ops/lora.h"

#include <algorithm>
#include <string>

#include "device/host/lora.h"

namespace castiron::host {

LoraInput::LoraInput(StepChecker& step, const Operand& x, const Operand& y)
    : kernels_(step.kernels()), x_(x), step_(step.index()), adaptable_(!step.step().modules.empty()) {
    if (!adaptable_) return;
    if (!x.shape[0].symbolic()) step.fail("names modules, and its rows are not those of the step");
    const int64_t columns = y.shape[1].value * (is_gated(step.step()) ? 2 : 1);
    int64_t end = 0;
    for (const ModuleColumns& one : step.step().modules) {
        if (one.column < end || one.count < 1 || one.count > columns - one.column || one.row < 0)
            step.fail("module '" + one.module + "' has columns that are not in the product, or twice");
        end = one.column + one.count;
    }
}

void LoraInput::shrink(const StepContext& context, const Lane& lane) const {
    const int64_t rows = context.bind(x_.shape[0]);
    const LoraStep* const* adapters = this->adapters(context);
    LinearArgs args;
    args.x = context.f32(x_);
    args.x_stride = x_.row_stride;
    args.k = x_.shape[1].value;
    args.y = context.lora_sums;
    args.n = context.lora_stride;
    // A unit is a panel of one adapter's ranks and a run of rows.
    int64_t unit = 0, mine = context.next();
    for (int64_t begin = 0, end = 0; begin < rows; begin = end) {
        while (end < rows && end - begin < kMaxLinearRows && adapters[end] == adapters[begin]) ++end;
        if (adapters[begin] == nullptr) continue;
        const LoraStep& adapter = adapters[begin][step_];
        args.weight = reinterpret_cast<const std::byte*>(adapter.a);
        for (int64_t panel = 0; panel < adapter.a_panels; ++panel) {
            if (unit++ != mine) continue;
            kernels_.linear(args, begin, end, panel, panel + 1, lane.scratch, WeightsAhead{});
            mine = context.next();
        }
    }
}

LoraRows LoraInput::rows(const StepContext& context) const {
    return {adapters(context), step_, context.lora_sums, context.lora_stride};
}

}  // namespace castiron::host
