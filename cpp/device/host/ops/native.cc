// A kernel that a plugin brings for the CPU: plugins/include/castiron_plugin.h.
#include <array>
#include <atomic>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "device/host/native_library.h"
#include "device/host/ops/ops.h"

namespace castiron::host {
namespace {

int32_t plugin_dtype(DType dtype) {
    return dtype == DType::kI32 ? CASTIRON_I32 : dtype == DType::kBF16 ? CASTIRON_BF16 : CASTIRON_F32;
}

class Native final : public Op {
public:
    explicit Native(StepChecker& step) {
        const Step& s = step.step();
        if (s.launches.size() != 1) step.fail("a plugin step has exactly one launch");
        const auto kernel = static_cast<size_t>(s.launches[0].kernel);
        const std::vector<Kernel>& kernels = step.program().kernels;
        if (kernel >= kernels.size()) step.fail("its launch names a kernel that the program lacks");
        const Kernel& k = kernels[kernel];
        try {
            library_ = std::make_unique<NativeLibrary>(k.name, k.image);
            function_ = library_->function(k.function);
        } catch (const std::invalid_argument& error) {
            step.fail(error.what());
        }
        if (s.inputs.size() + s.outputs.size() > kMost) {
            step.fail("has more than " + std::to_string(kMost) + " operands and results");
        }
        for (size_t i = 0; i < s.inputs.size(); ++i) inputs_.push_back(step.input(i));
        for (size_t i = 0; i < s.outputs.size(); ++i) {
            outputs_.push_back(step.output(i));
            step.check_contiguous(outputs_.back());
        }
        for (size_t i = 0; i < s.weights.size(); ++i) {
            const ResolvedWeight& w = step.weight(i);
            if (w.weight->layout != Layout::kPlain) {
                step.fail("weight '" + w.weight->name + "' is not row-major, and a plugin's must be");
            }
            castiron_tensor tensor{};
            // The kernel promises not to write; C has no const member that suits both operands and results.
            tensor.data = const_cast<std::byte*>(w.data);  // NOLINT
            tensor.dtype = plugin_dtype(w.weight->dtype);
            tensor.rank = static_cast<int32_t>(w.weight->shape.size());
            std::copy(w.weight->shape.begin(), w.weight->shape.end(), tensor.shape);
            tensor.row_stride = w.weight->shape.back();
            weights_.push_back(tensor);
        }
        step.finish();
    }

    void run(const StepContext& context, const Lane& lane, int) const override {
        std::array<castiron_tensor, kMost> operands;
        for (size_t i = 0; i < inputs_.size(); ++i) operands[i] = bind(context, inputs_[i]);
        for (size_t i = 0; i < outputs_.size(); ++i) {
            operands[inputs_.size() + i] = bind(context, outputs_[i]);
        }
        castiron_call call{};
        call.part = lane.part;
        call.parts = lane.parts;
        call.num_inputs = static_cast<int32_t>(inputs_.size());
        call.num_weights = static_cast<int32_t>(weights_.size());
        call.num_outputs = static_cast<int32_t>(outputs_.size());
        call.inputs = operands.data();
        call.weights = weights_.data();
        call.outputs = operands.data() + inputs_.size();
        try {
            if (const char* error = function_(&call)) context.report(error);
        } catch (const std::exception& error) {
            context.report(keep(error.what()));
        } catch (...) {
            context.report("a plugin kernel threw something that is no std::exception");
        }
    }

private:
    static constexpr size_t kMost = 64;

    [[nodiscard]] static castiron_tensor bind(const StepContext& context, const Operand& o) {
        castiron_tensor tensor{};
        tensor.data = context.arena + o.offset;
        tensor.dtype = plugin_dtype(o.dtype);
        tensor.rank = static_cast<int32_t>(o.shape.size());
        for (size_t axis = 0; axis < o.shape.size(); ++axis) tensor.shape[axis] = context.bind(o.shape[axis]);
        tensor.row_stride = o.shape.size() == 2 ? o.row_stride : tensor.shape[o.shape.size() - 1];
        return tensor;
    }

    // The first exception's text, kept where it outlives the exception.
    [[nodiscard]] const char* keep(const char* text) const {
        if (!kept_.exchange(true)) {
            std::snprintf(message_.data(), message_.size(), "a plugin kernel threw: %s", text);
        }
        return message_.data();
    }

    std::unique_ptr<NativeLibrary> library_;
    castiron_kernel function_ = nullptr;
    std::vector<Operand> inputs_, outputs_;
    std::vector<castiron_tensor> weights_;
    mutable std::array<char, 256> message_{"a plugin kernel threw an exception"};
    mutable std::atomic<bool> kept_{false};
};

}  // namespace

std::unique_ptr<Op> make_native(StepChecker& step) {
    return std::make_unique<Native>(step);
}

}  // namespace castiron::host
