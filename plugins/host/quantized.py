"""Products with quantized matrices: which kernel arithmetic an op's formats ask for."""

from __future__ import annotations

from ...graph.quant_plan import CODE_BITS
from ..reading import biases_in_pairs, matrix_elements, rounding_attrs
from ..tactic import (
    Attr,
    Context,
    Lowering,
    Op,
    Quant,
    Tactic,
    WeightUse,
)
from .epilogue import Epilogue, gated_epilogue, linear_epilogue
from .kernels import host_call

#: Operations per second for the ranking of tactics. Float products run the loops of dense ones, over weights
#: that are widened once for up to 96 rows, and hold less memory: they rank before them.
_INTEGER_OPS = 2.5e11
_FLOAT_OPS = 1.6e11
#: Inputs that share a scale where activations are rounded because integers are faster, unasked.
AUTO_GROUP = 32


def rounding(op: Op, context: Context, quant: Quant) -> dict[str, Attr]:
    """``x_format``, ``x_group`` and ``x_scale`` as the kernel takes them.

    Float32 builds leave activations alone. A rounding that the model declares is kept; where weights alone
    are quantized, ``Context.activations`` decides: int8 in groups of 32 if their codes multiply as integers.
    """
    declared = rounding_attrs(op)
    if context.half == "f32":
        return {"x_format": "float"}
    if declared is not None:
        return declared
    if context.activations == "auto" and _integers(quant):
        return {"x_format": "int8", "x_group": AUTO_GROUP}
    return {"x_format": "float"}


def _integers(quant: Quant) -> bool:
    nested = quant.group % AUTO_GROUP == 0 or (AUTO_GROUP % quant.group == 0 and quant.group % 4 == 0)
    return quant.format != "fp8" and nested


def quantized_uses(
    parts: tuple[str, ...], quant: Quant, stacked: int = 1
) -> tuple[list[WeightUse], dict[str, Attr]]:
    """Codes, scales and what else a quantized matrix has, with the attributes that say so."""
    uses = [WeightUse(parts, role, stacked=stacked) for role in ("codes", "scales")]
    if quant.has_offset:
        uses.append(WeightUse(parts, "offsets", stacked=stacked))
    if quant.columns is not None:
        uses.append(WeightUse(parts, "columns"))
    return uses, {
        "group": quant.group,
        "has_offsets": quant.has_offset,
        "has_columns": quant.columns is not None,
    }


def _fits(op: Op, context: Context) -> bool:
    x, w = op.required(0), op.required(1)
    return len(x.shape) == 2 and not x.constant and w.quant is not None


def _linear(op: Op, context: Context) -> Lowering:
    return _product(op, context, "quantized_linear", (op.required(1).name,), linear_epilogue(op))


def _gated_fits(op: Op, context: Context) -> bool:
    gate, up = op.required(1), op.required(2)
    return _fits(op, context) and gate.quant == up.quant and biases_in_pairs(op)


def _gated(op: Op, context: Context) -> Lowering:
    matrices = op.required(1).name, op.required(2).name
    return _product(op, context, "quantized_gated_linear", matrices, gated_epilogue(op))


def _product(op: Op, context: Context, kernel: str, matrices: tuple[str, ...], end: Epilogue) -> Lowering:
    quant = op.required(1).quant
    assert quant is not None  # _fits
    uses, stored = quantized_uses(matrices, quant)
    inputs = [op.required(0).name, *end.inputs]
    attrs = {**stored, **end.attrs, **rounding(op, context, quant)}
    return Lowering((host_call(kernel, inputs, [op.outputs[0].name], [*uses, *end.weights], attrs),))


def _cost(op: Op, context: Context, tokens: int) -> float:
    """The larger of arithmetic and reading the codes once."""
    quant = op.required(1).quant
    assert quant is not None  # _fits
    weights = matrix_elements(op)
    integers = rounding(op, context, quant)["x_format"] == "int8"
    arithmetic = 2.0 * tokens * weights / (_INTEGER_OPS if integers else _FLOAT_OPS)
    return max(arithmetic, weights * CODE_BITS[quant.format] / 8 / context.target.bandwidth)


TACTICS = (
    Tactic("host.quantized_linear", "castiron.Linear", "host", _fits, _linear, _cost),
    Tactic("host.quantized_gated_linear", "castiron.GatedLinear", "host", _gated_fits, _gated, _cost),
)
