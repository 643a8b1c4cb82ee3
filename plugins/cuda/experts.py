"""Products whose matrix each row's router picks: ExpertLinear and ExpertGatedLinear, of any weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..launch import value, weight
from ..reading import biases, biases_in_pairs, matrices, matrix_elements
from ..tactic import Call, Context, Lowering, Op, Operand, Tactic, WeightUse, element_count
from .expert_products import ExpertProduct
from .kernels.experts import expert_stream, expert_tile
from .kernels.quantized_experts import quantized_expert_stream, quantized_expert_tile
from .products import Arguments
from .quantize import rounded_input
from .quantized_form import QuantizedForm, form_of
from .quantized_operands import QuantizedOperands, weight_uses
from .quantized_tiles import product_of, quantized_classes, quantized_stream_tile
from .reference_experts import expert_gated_linear, expert_linear
from .tiles import Product, RowClass, StreamTile, row_classes, stream_tile
from .types import pointer

_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
_GATED = "castiron.ExpertGatedLinear"


@dataclass(frozen=True, kw_only=True)
class _Plain(ExpertProduct):
    x: Operand

    def all_classes(self) -> tuple[RowClass, ...]:
        return row_classes(self.context.target, self.shape, self.most_tokens)

    def operands(self) -> Arguments:
        y = (pointer(self.y.dtype), value(self.y.name))
        return {
            "x": (pointer(self.x.dtype), value(self.x.name)),
            "w": (pointer(self.context.half), weight(0)),
            "bias": ("*fp32", weight(1)) if self.has_bias else y,
        }

    def stream(self) -> tuple[Any, StreamTile, Mapping[str, Any]]:
        return expert_stream, stream_tile(self.context.target, self.shape), {}

    def tiled(self) -> tuple[Any, Mapping[str, Any]]:
        return expert_tile, {}


@dataclass(frozen=True, kw_only=True)
class _Quantized(ExpertProduct):
    form: QuantizedForm
    read: QuantizedOperands

    def all_classes(self) -> tuple[RowClass, ...]:
        return quantized_classes(self.context.target, self.shape, self.form, self.most_tokens)

    def operands(self) -> Arguments:
        return self.read.arguments(self.y)

    def stream(self) -> tuple[Any, StreamTile, Mapping[str, Any]]:
        tile = quantized_stream_tile(self.context.target, self.shape, self.form)
        return quantized_expert_stream, tile, self.read.constants(self.form.scales)

    def tiled(self) -> tuple[Any, Mapping[str, Any]]:
        return quantized_expert_tile, self.read.constants(self.form.tile_scales)


def _common(op: Op, context: Context) -> dict[str, Any]:
    x = op.required(0)
    return {
        "context": context,
        "ids": op.required(1),
        "y": op.outputs[0],
        "shared_x": len(x.shape) == 2,
        "has_bias": bool(biases(op)),
        "activation": str(op.attrs.get("activation", "none")),
    }


def _sizes(op: Op) -> tuple[int, int, int, int]:
    """Outputs and inputs of one expert, how many there are, and how many a token picks."""
    rows, inputs = (int(dim) for dim in matrices(op)[0].shape)
    experts = int(op.attrs["experts"])
    return rows // experts, inputs, experts, int(op.required(1).shape[1])


def _lower(op: Op, context: Context) -> Lowering:
    x = op.required(0)
    outputs, inputs, experts, picks = _sizes(op)
    shape = Product(outputs, inputs, op.kind == _GATED, _BYTES[x.dtype], experts=experts, picks=picks)
    product = _Plain(x=x, shape=shape, **_common(op, context))
    uses = [WeightUse(tuple(w.name for w in matrices(op)), "matrix")]
    if biases(op):
        uses.append(WeightUse(tuple(bias.name for bias in biases(op)), "vector"))
    call = _call(op, product, "", (x.name,), tuple(uses))
    return Lowering((call,), product.temporaries)


def _lower_quantized(op: Op, context: Context) -> Lowering:
    form = form_of(op, context)
    assert form is not None, "accepted"
    x = op.required(0)
    outputs, _, experts, picks = _sizes(op)
    columns = WeightUse((matrices(op)[0].name,), "columns")
    read = rounded_input(x, op.outputs[0].name, form, context, columns)
    uses = weight_uses(op, form, biases(op))
    x_bytes = 4 if read.x.dtype == "f32" else form.x_bytes
    product = _Quantized(
        form=form,
        read=QuantizedOperands(context, form, read, uses),
        shape=product_of(form, outputs, op.kind == _GATED, x_bytes, experts, picks),
        **_common(op, context),
    )
    names = tuple(operand.name for operand in read.temporaries) or (read.x.name,)
    call = _call(op, product, "quantized_", names, tuple(uses.values()))
    before = () if read.call is None else (read.call,)
    return Lowering((*before, call), (*read.temporaries, *product.temporaries))


def _call(
    op: Op, product: ExpertProduct, prefix: str, reads: tuple[str, ...], uses: tuple[WeightUse, ...]
) -> Call:
    return Call(
        f"{prefix}expert_gated_linear" if product.shape.gated else f"{prefix}expert_linear",
        [*reads, product.ids.name],
        [product.y.name, *(operand.name for operand in product.temporaries)],
        uses,
        {"experts": product.shape.experts, "activation": product.activation},
        tuple(product.launches()),
    )


def _fits(op: Op, context: Context) -> bool:
    x, ids = op.required(0), op.required(1)
    return (
        not x.constant
        and len(x.shape) in (2, 3)
        and len(ids.shape) == 2
        and isinstance(ids.shape[1], int)
        and ids.dtype == "i32"
        and all(w.constant and len(w.shape) == 2 for w in matrices(op))
        and biases_in_pairs(op)
    )


def _quantized_fits(op: Op, context: Context) -> bool:
    return _fits(op, context) and form_of(op, context) is not None


def _seconds(op: Op, context: Context, tokens: int, w_bytes: float, rate: float) -> float:
    """The larger of reading the matrices of all experts once and the arithmetic of those picked."""
    elements = matrix_elements(op)
    pairs = element_count(op.required(1).shape, tokens)
    arithmetic = 2.0 * pairs * elements / int(op.attrs["experts"])
    target = context.target
    return max(w_bytes * elements / target.bandwidth, arithmetic / (rate * target.matrix_flops))


def _cost(op: Op, context: Context, tokens: int) -> float:
    return _seconds(op, context, tokens, 2.0, 1.0)


def _quantized_cost(op: Op, context: Context, tokens: int) -> float:
    form = form_of(op, context)
    assert form is not None, "accepted"
    rate = 1.0 if form.math == "half" else 2.0
    return _seconds(op, context, tokens, form.w_bytes, rate) * 0.99


TACTICS = (
    Tactic("cuda.expert_linear", "castiron.ExpertLinear", "cuda", _fits, _lower, _cost, expert_linear),
    Tactic("cuda.expert_gated_linear", _GATED, "cuda", _fits, _lower, _cost, expert_gated_linear),
    Tactic(
        "cuda.quantized_expert_linear",
        "castiron.ExpertLinear",
        "cuda",
        _quantized_fits,
        _lower_quantized,
        _quantized_cost,
        expert_linear,
    ),
    Tactic(
        "cuda.quantized_expert_gated_linear",
        _GATED,
        "cuda",
        _quantized_fits,
        _lower_quantized,
        _quantized_cost,
        expert_gated_linear,
    ),
)
