// Makers of ops by kernel name (docs/program.md). Each checks its step with the StepChecker and throws
// std::invalid_argument where it is not valid.
#pragma once

#include <memory>

#include "device/host/op.h"
#include "device/host/step_checker.h"

namespace castiron::host {

std::unique_ptr<Op> make_embedding(StepChecker& step);
std::unique_ptr<Op> make_linear(StepChecker& step);            // linear, gated_linear
std::unique_ptr<Op> make_quantized_linear(StepChecker& step);  // quantized_linear, quantized_gated_linear
std::unique_ptr<Op> make_expert_linear(StepChecker& step);     // expert_[gated_]linear
std::unique_ptr<Op> make_quantized_expert_linear(StepChecker& step);  // quantized_expert_[gated_]linear
std::unique_ptr<Op> make_round(StepChecker& step);
std::unique_ptr<Op> make_norm(StepChecker& step);  // [add_]rms_norm, [add_]layer_norm
std::unique_ptr<Op> make_rope(StepChecker& step);
std::unique_ptr<Op> make_write_kv(StepChecker& step);  // write_kv, rope_write_kv
std::unique_ptr<Op> make_paged_attention(StepChecker& step);
std::unique_ptr<Op> make_gather_rows(StepChecker& step);
std::unique_ptr<Op> make_gather(StepChecker& step);
std::unique_ptr<Op> make_unary(StepChecker& step);
std::unique_ptr<Op> make_clip(StepChecker& step);
std::unique_ptr<Op> make_binary(StepChecker& step);
std::unique_ptr<Op> make_copy(StepChecker& step);
std::unique_ptr<Op> make_transpose(StepChecker& step);
std::unique_ptr<Op> make_slice(StepChecker& step);
std::unique_ptr<Op> make_concat(StepChecker& step);
std::unique_ptr<Op> make_reduce(StepChecker& step);
std::unique_ptr<Op> make_softmax(StepChecker& step);
std::unique_ptr<Op> make_matmul(StepChecker& step);
std::unique_ptr<Op> make_top_k(StepChecker& step);
std::unique_ptr<Op> make_gather_elements(StepChecker& step);
std::unique_ptr<Op> make_mark_places(StepChecker& step);
std::unique_ptr<Op> make_native(StepChecker& step);

// The op of a step, by its kernel.
std::unique_ptr<Op> make_op(StepChecker& step);

[[nodiscard]] Activation read_activation(StepChecker& step);

}  // namespace castiron::host
