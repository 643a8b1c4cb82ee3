"""Matrix products: Linear with its epilogues, GatedLinear, and the generic MatMul of two activations."""

from __future__ import annotations

from ..reading import biases_in_pairs, is_plain_matmul, matrix_elements, rounding_attrs
from ..tactic import (
    Attr,
    Call,
    Context,
    Lowering,
    Op,
    Operand,
    Tactic,
    WeightUse,
    bandwidth_cost,
    element_count,
)
from .epilogue import Epilogue, gated_epilogue, linear_epilogue
from .kernels import host_call

FLOPS = 1.5e11


def _rows_and_matrix(op: Op, context: Context) -> bool:
    x, w = op.required(0), op.required(1)
    return len(x.shape) == 2 and not x.constant and len(w.shape) == 2 and w.constant


def _rounded_input(op: Op, context: Context) -> tuple[Operand, tuple[Call, ...]]:
    """x, or what is left of it in float32 after the rounding that the op declares, and the call for that."""
    x, attrs = op.required(0), rounding_attrs(op)
    if attrs is None or context.half == "f32":
        return x, ()
    rounded = Operand(f"{op.outputs[0].name}.rounded", x.shape)
    return rounded, (host_call("round", [x.name], [rounded.name], (), attrs),)


def x_format(context: Context) -> dict[str, Attr]:
    """Float32 builds keep activations so where weights are bf16, whatever the CPU multiplies faster."""
    return {"x_format": "float"} if context.half == "f32" else {}


def _linear(op: Op, context: Context) -> Lowering:
    return _product(op, context, "linear", (op.required(1).name,), linear_epilogue(op))


def _gated(op: Op, context: Context) -> Lowering:
    return _product(
        op, context, "gated_linear", (op.required(1).name, op.required(2).name), gated_epilogue(op)
    )


def _product(op: Op, context: Context, kernel: str, matrices: tuple[str, ...], end: Epilogue) -> Lowering:
    x, rounded = _rounded_input(op, context)
    weights = [WeightUse(matrices, "matrix"), *end.weights]
    attrs = {**end.attrs, **x_format(context)}
    call = host_call(kernel, [x.name, *end.inputs], [op.outputs[0].name], weights, attrs)
    return Lowering((*rounded, call), (x,) if rounded else ())


def _gated_fits(op: Op, context: Context) -> bool:
    return _rows_and_matrix(op, context) and biases_in_pairs(op)


def _product_cost(op: Op, context: Context, tokens: int) -> float:
    weights = matrix_elements(op)
    # The larger of arithmetic and reading the weights once.
    return max(2.0 * tokens * weights / FLOPS, bandwidth_cost(op, context, tokens))


def _matmul_fits(op: Op, context: Context) -> bool:
    return is_plain_matmul(op)


def _matmul(op: Op, context: Context) -> Lowering:
    a, b = op.required(0), op.required(1)
    return Lowering((host_call("matmul", [a.name, b.name], [op.outputs[0].name]),))


def _matmul_cost(op: Op, context: Context, tokens: int) -> float:
    a: Operand = op.required(0)
    columns = op.outputs[0].shape[-1]
    width = tokens if isinstance(columns, str) else columns
    return 2.0 * element_count(a.shape, tokens) * width / 1e10


TACTICS = (
    Tactic("host.linear", "castiron.Linear", "host", _rows_and_matrix, _linear, _product_cost),
    Tactic("host.gated_linear", "castiron.GatedLinear", "host", _gated_fits, _gated, _product_cost),
    Tactic("host.matmul", "MatMul", "host", _matmul_fits, _matmul, _matmul_cost),
)
