"""Activations and other functions of one number, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Through e^-2|x|, which cannot overflow; near zero, where 1 - e cancels, by its series."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = tl.abs(x) * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    size = tl.where(tl.abs(x) < 0.03, near, far)
    return tl.where(x < 0, -size, size)


@triton.jit
def apply(x, FN: tl.constexpr):
    """``FN`` of a float32 block: the names of docs/program.md (``activation`` and ``unary``)."""
    if FN == "none":
        y = x
    elif FN == "silu":
        y = x * sigmoid(x)
    elif FN == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif FN == "gelu_erf":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FN == "gelu_quick":
        y = x * sigmoid(1.702 * x)
    elif FN == "relu":
        y = tl.maximum(x, 0.0)
    elif FN == "relu2":
        positive = tl.maximum(x, 0.0)
        y = positive * positive
    elif FN == "tanh":
        y = tanh(x)
    elif FN == "sigmoid":
        y = sigmoid(x)
    elif FN == "exp":
        y = tl.exp(x)
    elif FN == "log":
        y = tl.log(x)
    elif FN == "sqrt":
        y = tl.sqrt_rn(x)
    elif FN == "rsqrt":
        y = 1.0 / tl.sqrt_rn(x)
    elif FN == "neg":
        y = -x
    elif FN == "abs":
        y = tl.abs(x)
    elif FN == "reciprocal":
        y = 1.0 / x
    elif FN == "softplus":
        y = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    elif FN == "sin":
        y = tl.sin(x)
    elif FN == "cos":
        y = tl.cos(x)
    elif FN == "erf":
        y = tl.erf(x)
    elif FN == "square":
        y = x * x
    else:
        tl.static_assert(False, "unknown function")
    return y
