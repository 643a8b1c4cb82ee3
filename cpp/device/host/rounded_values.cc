#include "device/host/rounded_values.h"

#include <string>
#include <vector>

#include "device/host/kernels/table.h"

namespace castiron::host {
namespace {

bool multiplies_bf16(const Program& program, const Step& step) {
    if (step.kernel != "linear" && step.kernel != "gated_linear") return false;
    if (step.weights.empty() || static_cast<size_t>(step.weights[0]) >= program.weights.size()) return false;
    const auto format = step.attrs.find("x_format");
    if (format != step.attrs.end() && format->second == Attr{std::string("float")}) return false;
    return program.weights[static_cast<size_t>(step.weights[0])].layout == Layout::kPanel16x2;
}

// Rows of bf16 have room where its rows of float32 would lie.
bool holds_rows(const Operand& o) {
    if (o.dtype != DType::kF32 || o.view || o.shape.size() != 2 || o.shape[1].symbolic()) return false;
    return bf16_row_bytes(o.shape[1].value) <= o.shape[1].value * 4;
}

}  // namespace

void find_rounded_values(const Program& program, std::span<Operand> values) {
    struct Uses {
        int written = 0, by_products = 0, otherwise = 0;
    };
    std::vector<Uses> uses(values.size());
    Uses nobody;  // for what a step names that does not exist, which its own check refuses
    const auto of = [&](int index) -> Uses& {
        return index < 0 || static_cast<size_t>(index) >= uses.size() ? nobody
                                                                      : uses[static_cast<size_t>(index)];
    };
    for (const Value& value : program.values) {
        if (value.base >= 0) ++of(value.base).otherwise;
    }
    for (const Step& step : program.steps) {
        const bool product = multiplies_bf16(program, step);
        for (size_t i = 0; i < step.inputs.size(); ++i) {
            Uses& u = of(step.inputs[i]);
            // What is read before it is written comes from outside.
            ++(product && i == 0 && u.written == 1 ? u.by_products : u.otherwise);
        }
        for (const int output : step.outputs) ++of(output).written;
    }
    for (size_t i = 0; i < values.size(); ++i) {
        values[i].may_round = holds_rows(values[i]) && uses[i].written == 1 && uses[i].by_products > 0 &&
                              uses[i].otherwise == 0;
    }
}

}  // namespace castiron::host
