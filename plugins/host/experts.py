"""Mixtures of experts: what a router picks, and products whose matrix each row picks."""

from __future__ import annotations

from ..reading import biases_in_pairs, matrix_elements
from ..tactic import (
    Attr,
    Context,
    Lowering,
    Op,
    Operand,
    Tactic,
    View,
    WeightUse,
    bandwidth_cost,
    element_count,
)
from .kernels import host_call
from .linear import FLOPS, x_format
from .quantized import quantized_uses, rounding


def _top_k_fits(op: Op, context: Context) -> bool:
    x = op.required(0)
    last = op.attrs.get("axis", -1) in (-1, len(x.shape) - 1)
    return last and x.dtype == "f32" and not x.constant and op.attrs.get("largest", 1) == 1


def _top_k(op: Op, context: Context) -> Lowering:
    names = [output.name for output in op.outputs]
    return Lowering((host_call("top_k", [op.required(0).name], names),))


def _gather_fits(op: Op, context: Context) -> bool:
    x, places = op.required(0), op.required(1)
    last = op.attrs.get("axis", 0) in (-1, len(x.shape) - 1)
    return last and not x.constant and not places.constant and x.shape[:-1] == places.shape[:-1]


def _gather(op: Op, context: Context) -> Lowering:
    inputs = [op.required(0).name, op.required(1).name]
    return Lowering((host_call("gather_elements", inputs, [op.outputs[0].name]),))


def _mark(op: Op, context: Context) -> Lowering:
    return Lowering((host_call("mark_places", [op.required(0).name], [op.outputs[0].name]),))


def _combine(op: Op, context: Context) -> Lowering:
    """A row of weights times the matrix of a token's outputs."""
    y, weights, out = op.required(0), op.required(1), op.outputs[0]
    tokens, picks, columns = y.shape
    row, result = f"{out.name}.weights", f"{out.name}.row"
    return Lowering(
        (
            View(row, weights.name, (tokens, 1, picks)),
            host_call("matmul", [row, y.name], [result]),
            View(out.name, result, out.shape),
        ),
        (Operand(result, (tokens, 1, columns)),),
    )


def _picked_rows(op: Op) -> bool:
    x, ids = op.required(0), op.required(1)
    return not x.constant and len(x.shape) in (2, 3) and len(ids.shape) == 2 and op.required(2).constant


def _linear_fits(op: Op, context: Context) -> bool:
    return _picked_rows(op) and not op.attrs.get("x_format")


def _linear(op: Op, context: Context) -> Lowering:
    experts = int(op.attrs["experts"])
    weights = [WeightUse((op.required(2).name,), "matrix", stacked=experts)]
    return _product(op, "expert_linear", weights, x_format(context))


def _quantized_fits(op: Op, context: Context) -> bool:
    return _picked_rows(op) and op.required(2).quant is not None


def _quantized(op: Op, context: Context) -> Lowering:
    weight = op.required(2)
    assert weight.quant is not None  # _quantized_fits
    uses, stored = quantized_uses((weight.name,), weight.quant, int(op.attrs["experts"]))
    attrs = {**stored, **rounding(op, context, weight.quant)}
    return _product(op, "quantized_expert_linear", uses, attrs)


def _gated_fits(op: Op, context: Context) -> bool:
    return _linear_fits(op, context) and biases_in_pairs(op)


def _gated(op: Op, context: Context) -> Lowering:
    weights = [WeightUse(_pair(op, 2), "matrix", stacked=int(op.attrs["experts"]))]
    return _gated_product(op, "expert_gated_linear", weights, x_format(context))


def _quantized_gated_fits(op: Op, context: Context) -> bool:
    same = op.required(2).quant == op.required(3).quant
    return _quantized_fits(op, context) and same and biases_in_pairs(op)


def _quantized_gated(op: Op, context: Context) -> Lowering:
    quant = op.required(2).quant
    assert quant is not None  # _quantized_fits
    uses, stored = quantized_uses(_pair(op, 2), quant, int(op.attrs["experts"]))
    attrs = {**stored, **rounding(op, context, quant)}
    return _gated_product(op, "quantized_expert_gated_linear", uses, attrs)


def _pair(op: Op, first: int) -> tuple[str, str]:
    return op.required(first).name, op.required(first + 1).name


def _gated_product(op: Op, kernel: str, weights: list[WeightUse], attrs: dict[str, Attr]) -> Lowering:
    has_bias = op.input(4) is not None
    experts = int(op.attrs["experts"])
    vectors = [WeightUse(_pair(op, 4), "vector", stacked=experts)] if has_bias else []
    own: dict[str, Attr] = {"experts": experts, "has_bias": has_bias}
    attrs = {**attrs, **own, "activation": str(op.attrs["activation"])}
    inputs = [op.required(0).name, op.required(1).name]
    return Lowering((host_call(kernel, inputs, [op.outputs[0].name], [*weights, *vectors], attrs),))


def _product(op: Op, kernel: str, weights: list[WeightUse], attrs: dict[str, Attr]) -> Lowering:
    bias = op.input(3)
    attrs |= {"experts": int(op.attrs["experts"]), "has_bias": bias is not None}
    vectors = [] if bias is None else [WeightUse((bias.name,), "vector")]
    inputs = [op.required(0).name, op.required(1).name]
    return Lowering((host_call(kernel, inputs, [op.outputs[0].name], [*weights, *vectors], attrs),))


def _cost(op: Op, context: Context, tokens: int) -> float:
    """The larger of arithmetic and reading the matrices of all experts once; a quantized product is dear."""
    one = matrix_elements(op) / int(op.attrs["experts"])
    arithmetic = 2.0 * element_count(op.required(1).shape, tokens) * one / FLOPS
    return max(arithmetic, bandwidth_cost(op, context, tokens))


def _quantized_cost(op: Op, context: Context, tokens: int) -> float:
    """Less than that of the widened matrix, which takes more memory."""
    return _cost(op, context, tokens) / 2


TACTICS = (
    Tactic("host.top_k", "TopK", "host", _top_k_fits, _top_k, bandwidth_cost),
    Tactic("host.gather_elements", "GatherElements", "host", _gather_fits, _gather, bandwidth_cost),
    Tactic(
        "host.mark_places", "castiron.MarkPlaces", "host", lambda op, context: True, _mark, bandwidth_cost
    ),
    Tactic("host.expert_linear", "castiron.ExpertLinear", "host", _linear_fits, _linear, _cost),
    Tactic(
        "host.quantized_expert_linear",
        "castiron.ExpertLinear",
        "host",
        _quantized_fits,
        _quantized,
        _quantized_cost,
    ),
    Tactic(
        "host.expert_gated_linear",
        "castiron.ExpertGatedLinear",
        "host",
        _gated_fits,
        _gated,
        _cost,
    ),
    Tactic(
        "host.quantized_expert_gated_linear",
        "castiron.ExpertGatedLinear",
        "host",
        _quantized_gated_fits,
        _quantized_gated,
        _quantized_cost,
    ),
    Tactic(
        "host.combine_experts",
        "castiron.CombineExperts",
        "host",
        lambda op, context: True,
        _combine,
        bandwidth_cost,
    ),
)
