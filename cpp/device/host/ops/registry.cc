#include <string_view>
#include <utility>

#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

using Maker = std::unique_ptr<Op> (*)(StepChecker&);

constexpr std::pair<std::string_view, Maker> kMakers[] = {
    {"embedding", make_embedding},
    {"linear", make_linear},
    {"gated_linear", make_linear},
    {"quantized_linear", make_quantized_linear},
    {"quantized_gated_linear", make_quantized_linear},
    {"expert_linear", make_expert_linear},
    {"expert_gated_linear", make_expert_linear},
    {"quantized_expert_linear", make_quantized_expert_linear},
    {"quantized_expert_gated_linear", make_quantized_expert_linear},
    {"round", make_round},
    {"rms_norm", make_norm},
    {"add_rms_norm", make_norm},
    {"layer_norm", make_norm},
    {"add_layer_norm", make_norm},
    {"rope", make_rope},
    {"rope_write_kv", make_write_kv},
    {"write_kv", make_write_kv},
    {"paged_attention", make_paged_attention},
    {"gather_rows", make_gather_rows},
    {"gather", make_gather},
    {"unary", make_unary},
    {"clip", make_clip},
    {"binary", make_binary},
    {"copy", make_copy},
    {"transpose", make_transpose},
    {"slice", make_slice},
    {"concat", make_concat},
    {"reduce", make_reduce},
    {"softmax", make_softmax},
    {"matmul", make_matmul},
    {"top_k", make_top_k},
    {"gather_elements", make_gather_elements},
    {"mark_places", make_mark_places},
    {"native", make_native},
};

constexpr std::pair<std::string_view, Activation> kActivations[] = {
    {"none", Activation::kNone},        {"silu", Activation::kSilu}, {"gelu_tanh", Activation::kGeluTanh},
    {"gelu_erf", Activation::kGeluErf}, {"relu", Activation::kRelu}, {"gelu_quick", Activation::kGeluQuick},
    {"relu2", Activation::kRelu2},      {"tanh", Activation::kTanh}, {"sigmoid", Activation::kSigmoid},
};

}  // namespace

std::unique_ptr<Op> make_op(StepChecker& step) {
    for (const auto& [name, maker] : kMakers) {
        if (name == step.step().kernel) return maker(step);
    }
    step.fail("the host device has no kernel of this name; rebuild the engine with this version of castiron");
}

Activation read_activation(StepChecker& step) {
    const std::string name = step.text_or("activation", "none");
    for (const auto& [known, activation] : kActivations) {
        if (known == name) return activation;
    }
    step.fail("unknown activation '" + name + "'");
}

}  // namespace castiron::host
