"""A fused activation: silu(gate) * up in one pass, in CUDA C++ for GPUs and in C++ for the CPU.

It replaces the two ops of a SwiGLU MLP wherever the graph has them. (castiron fuses them deeper, into the
matrix product, when no plugin asks for them; this file shows how a plugin is made, not how to be faster.)

    castiron plugin test examples/plugins/silu_mul.py
    castiron build MODEL -o ENGINE --plugin examples/plugins/silu_mul.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from castiron.plugins.sdk import (
    Call,
    Context,
    CudaKernel,
    CustomOp,
    Example,
    Grid,
    HostKernel,
    KernelLaunch,
    Lowering,
    Op,
    Pattern,
    Plugin,
    Tactic,
    bandwidth_cost,
    row_stride,
    value,
)

# Storage types in CUDA C++: the type, how a number x of it becomes a float, and a float x one of it.
CUDA_TYPES = {
    "f32": ("float", "x", "x"),
    "bf16": ("unsigned short", "__uint_as_float((unsigned)x << 16)", "round_bf16(x)"),
}

CUDA_SOURCE = """
// Round to nearest even; bfloat16 is the upper half of a float.
__device__ unsigned short round_bf16(float x) {{
    unsigned bits = __float_as_uint(x);
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}}
__device__ float load(const {source}* p) {{ {source} x = *p; return {to_float}; }}
__device__ {result} store(float x) {{ return {from_float}; }}

// One block for each row.
extern "C" __global__ void silu_mul(const {source}* gate, const {source}* up, {result}* y, int gate_stride,
                                    int up_stride) {{
    gate += (long long)blockIdx.x * gate_stride;
    up += (long long)blockIdx.x * up_stride;
    y += (long long)blockIdx.x * {columns};
    for (int i = threadIdx.x; i < {columns}; i += blockDim.x) {{
        float g = load(gate + i);
        y[i] = store(g / (1.0f + __expf(-g)) * load(up + i));
    }}
}}
"""

HOST_SOURCE = """
#include <cmath>
#include "castiron_plugin.h"

extern "C" const char* silu_mul(const castiron_call* call) {
    const castiron_tensor &gate = call->inputs[0], &up = call->inputs[1], &y = call->outputs[0];
    for (int64_t row = call->part; row < y.shape[0]; row += call->parts) {
        const float* g = static_cast<const float*>(gate.data) + row * gate.row_stride;
        const float* u = static_cast<const float*>(up.data) + row * up.row_stride;
        float* out = static_cast<float*>(y.data) + row * y.row_stride;
        for (int64_t c = 0; c < y.shape[1]; ++c) out[c] = g[c] / (1 + std::exp(-g[c])) * u[c];
    }
    return nullptr;
}
"""


def reference(gate: np.ndarray[Any, Any], up: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the op means."""
    return gate / (1 + np.exp(-gate)) * up


def fits(op: Op, context: Context) -> bool:
    """Matrices in storage types that the kernels have; on the CPU everything is float32."""
    gate, up, y = op.required(0), op.required(1), op.outputs[0]
    return len(y.shape) == 2 and gate.dtype == up.dtype and {gate.dtype, y.dtype} <= set(CUDA_TYPES)


def on_gpu(op: Op, context: Context) -> Lowering:
    """One launch; types and the number of columns are constants of the kernel."""
    gate, up, y = op.required(0), op.required(1), op.outputs[0]
    rows, columns = y.shape
    source = CUDA_SOURCE.format(
        source=CUDA_TYPES[gate.dtype][0],
        to_float=CUDA_TYPES[gate.dtype][1],
        result=CUDA_TYPES[y.dtype][0],
        from_float=CUDA_TYPES[y.dtype][2],
        columns=columns,
    )
    kernel = CudaKernel(source, "silu_mul", ("ptr", "ptr", "ptr", "i32", "i32"), threads=256, origin=__file__)
    grid = Grid("N") if rows == "N" else Grid("T")
    args = (value(gate.name), value(up.name), value(y.name), row_stride(gate.name), row_stride(up.name))
    launch = KernelLaunch(kernel, (grid,), args)
    call = Call("demo.silu_mul", [gate.name, up.name], [y.name], launches=(launch,), takes_views=True)
    return Lowering((call,))


def on_host(op: Op, context: Context) -> Lowering:
    """One call; the rows are dealt out to the threads by the kernel itself."""
    gate, up, y = op.required(0), op.required(1), op.outputs[0]
    launch = KernelLaunch(HostKernel(HOST_SOURCE, "silu_mul", origin=__file__), (Grid(),), ())
    call = Call("native", [gate.name, up.name], [y.name], launches=(launch,), takes_views=True)
    return Lowering((call,))


PLUGIN = Plugin(
    name="silu-mul",
    ops=(CustomOp("demo.SiluMul", ("gate", "up"), lambda gate, up: [gate], reference),),
    patterns=(
        Pattern(
            "silu(gate) * up",
            match=lambda op, gate, up: op.Mul(op.Activation(gate, fn="silu", _domain="castiron"), up),
            replace=lambda op, gate, up: op.SiluMul(gate, up, _domain="demo"),
        ),
    ),
    tactics=(
        Tactic("demo.silu_mul.cuda", "demo.SiluMul", "cuda", fits, on_gpu, bandwidth_cost, reference),
        Tactic("demo.silu_mul.host", "demo.SiluMul", "host", fits, on_host, bandwidth_cost, reference),
    ),
    examples=(
        Example("demo.SiluMul", (("T", 96), ("T", 96)), {}),
        Example("demo.SiluMul", (("T", 1000), ("T", 1000)), {}),
    ),
)
