// A plugin's library for host_native.cc: one good kernel and several bad ones.
#define CASTIRON_PLUGIN_SOURCE
#include <stdexcept>

#include "castiron_plugin.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// y[row][c] = x[row][c] * w[c], rows dealt out to the threads in turn; takes a view.
EXPORT const char* scale_columns(const castiron_call* call) {
    if (call->num_inputs != 1 || call->num_weights != 1 || call->num_outputs != 1) return "wrong operands";
    const castiron_tensor &x = call->inputs[0], &w = call->weights[0], &y = call->outputs[0];
    for (int64_t row = call->part; row < x.shape[0]; row += call->parts) {
        const float* in = static_cast<const float*>(x.data) + row * x.row_stride;
        float* out = static_cast<float*>(y.data) + row * y.row_stride;
        for (int64_t c = 0; c < x.shape[1]; ++c) out[c] = in[c] * static_cast<const float*>(w.data)[c];
    }
    return nullptr;
}

EXPORT const char* complains(const castiron_call*) {
    return "the plugin is not in the mood";
}

EXPORT const char* throws(const castiron_call*) {
    throw std::runtime_error("nine lives are over");
}
