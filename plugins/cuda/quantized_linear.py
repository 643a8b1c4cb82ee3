"""Matrix products with quantized weights: Linear and GatedLinear by classes of row counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..launch import KernelLaunch, Param, When, row_stride, value, weight
from ..reading import biases_in_pairs
from ..tactic import Call, Context, Lowering, Op, Operand, Tactic, WeightUse, element_count
from .kernels.quantized_linear import quantized_stream, quantized_tile
from .kernels.scaled_linear import scaled_tile
from .products import Arguments, MatrixProduct, tiling
from .quantize import RoundedInput, float4_input, rounded_input
from .quantized_form import QuantizedForm, form_of, matrices
from .quantized_tiles import product_of, quantized_classes, quantized_stream_tile, scaled_classes
from .reference_ops import gated_linear, linear
from .tiles import STREAM_ROWS, RowClass
from .types import blocks_over, count, next_power_of_two, pointer, symbol


@dataclass(frozen=True, kw_only=True)
class _Product(MatrixProduct):
    """``x``, ``many_x``: what it reads with few rows and with many.

    ``uses``: the weights by role, in the call's order.
    """

    form: QuantizedForm
    x: RoundedInput
    many_x: RoundedInput
    uses: Mapping[str, WeightUse]

    def all_classes(self) -> tuple[RowClass, ...]:
        if self.form.scaled:
            return scaled_classes(self.shape, self.most_rows)
        return quantized_classes(self.context.target, self.shape, self.form, self.most_rows)

    def constants(self, scales: str) -> dict[str, Any]:
        form = self.form
        # One group is as good as the next power of two: kernels cut steps at powers of two.
        whole = next_power_of_two(form.inputs)
        return {
            "K": form.inputs,
            "GROUP": whole if form.group == form.inputs else form.group,
            "X_GROUP": form.x_group or whole,
            "MATH": form.math,
            "FORMAT": form.quant.format,
            "SCALES": scales,
            "X_SCALES": form.x_scales,
            "HAS_OFFSETS": form.quant.has_offset,
            "HALF": self.context.half,
        }

    def arguments(self, y: Operand) -> Arguments:
        nothing = (pointer(y.dtype), value(y.name))
        residual = self.residual or self.y
        x, x_scales = self.x.x, self.x.scales
        scales = self._weight("scales", pointer(self.form.quant.scale_dtype), nothing)
        rows = self._weight("row_scales", "*fp32", scales)
        return {
            "x": (pointer(x.dtype), value(x.name)),
            "x_scales": nothing if x_scales is None else ("*fp32", value(x_scales.name)),
            "codes": self._weight("codes", self._codes_type, nothing),
            "scales": self._weight("block_scales", "*u8", scales),
            "row_scales": rows,
            "offsets": self._weight("offsets", "*fp32", nothing),
            "bias": self._weight("vector", "*fp32", nothing),
            "residual": (pointer(residual.dtype), value(residual.name)),
            "y": (pointer(y.dtype), value(y.name)),
            "rows": ("i32", count(self.rows)),
            "x_stride": ("i32", row_stride(x.name)),
            "residual_stride": ("i32", row_stride(residual.name)),
            "x_scale": ("fp32", Param("f32", self._x_scale)),
        }

    def stream(self) -> KernelLaunch:
        tile = quantized_stream_tile(self.context.target, self.shape, self.form)
        return self.stream_launch(quantized_stream, tile, self.constants(self.form.scales))

    def tiled(self, of_class: RowClass) -> tuple[KernelLaunch, ...]:
        if self.form.scaled:
            return (self._scaled(of_class),)
        return self.tiled_launches(quantized_tile, of_class, self.constants(self.form.tile_scales))

    def _scaled(self, of_class: RowClass) -> KernelLaunch:
        tile, form, read = of_class.tile, self.form, self.many_x
        assert read.block_scales is not None
        given = dict(self.arguments(self.y))
        given |= {
            "x": (pointer(read.x.dtype), value(read.x.name)),
            "x_blocks": (pointer("u8"), value(read.block_scales.name)),
            "blocks": given["scales"],
            "codes": ("*u8", given["codes"][1]),
        }
        if read.scales is not None:
            given["x_scales"] = ("*fp32", value(read.scales.name))
        names = ("x", "x_blocks", "x_scales", "codes", "blocks", "row_scales", "bias", "residual", "y")
        constants = {
            "K": form.inputs,
            "GROUP": form.group,
            "X_STRIDE": read.x.shape[1],
            "X_SCALES": form.x_scales,
            **tiling(tile),
        }
        arguments = {name: given[name] for name in (*names, "rows", "residual_stride", "x_scale")}
        grid = blocks_over(self.rows, tile.block_m, -(-self.shape.n // tile.block_n))
        rows = (of_class.low, of_class.high)
        return self.launch(scaled_tile, arguments, constants, grid, rows, tile.warps, tile.stages)

    def _weight(self, role: str, kind: str, absent: tuple[str, Param]) -> tuple[str, Param]:
        return (kind, weight(list(self.uses).index(role))) if role in self.uses else absent

    @property
    def _codes_type(self) -> str:
        if self.form.packed:
            return "*u32"
        if self.form.quant.format == "int8":
            return "*i8"
        # Before sm_89 there are no conversions of float8: kernels take the bytes.
        return "*fp8e4nv" if self.context.target.compute_capability >= 89 else "*u8"

    @property
    def _x_scale(self) -> float:
        """The static scale of x, where the numbers that the product reads lack it."""
        form = self.form
        lacks = form.x_storage in ("codes", "values") or form.x_format == "nvfp4"
        return form.x_scale if lacks and form.x_scale else 1.0


def _uses(op: Op, form: QuantizedForm, biases: tuple[Operand, ...]) -> dict[str, WeightUse]:
    parts = tuple(operand.name for operand in matrices(op))
    uses = {"codes": WeightUse(parts, "codes")}
    if form.scales in ("e4m3", "e8m0"):
        uses["block_scales"] = WeightUse(parts, "block_scales")
        if form.scales == "e4m3":
            uses["row_scales"] = WeightUse(parts, "row_scales")
    else:
        uses["scales"] = WeightUse(parts, "scales")
    if form.quant.has_offset:
        uses["offsets"] = WeightUse(parts, "offsets")
    if biases:
        uses["vector"] = WeightUse(tuple(bias.name for bias in biases), "vector")
    return uses


def _lower(op: Op, context: Context) -> Lowering:
    form = form_of(op, context)
    assert form is not None, "accepted"
    gated = op.kind == "castiron.GatedLinear"
    x, y, w = op.required(0), op.outputs[0], op.required(1)
    given = (op.input(3), op.input(4)) if gated else (op.input(2),)
    residual = None if gated else op.input(3)
    columns = WeightUse((w.name,), "columns")
    few = many = None
    if form.scaled and isinstance(x.shape[0], str):
        few, many = When(symbol(x.shape[0]), 0, STREAM_ROWS), When(symbol(x.shape[0]), STREAM_ROWS + 1)
    x_read = rounded_input(x, y.name, form, context, columns, few)
    many_x = x_read
    if form.scaled:
        many_x = float4_input(x, y.name, form, context, many, codes=True)
    x_bytes = 4 if x_read.x.dtype == "f32" else form.x_bytes
    uses = _uses(op, form, tuple(bias for bias in given if bias is not None))
    product = _Product(
        name=y.name,
        form=form,
        shape=product_of(form, int(w.shape[0]), gated, x_bytes),
        context=context,
        read=x,
        x=x_read,
        many_x=many_x,
        y=y,
        residual=residual,
        uses=uses,
        has_bias="vector" in uses,
        activation=str(op.attrs.get("activation", "none")),
        alpha=float(op.attrs.get("alpha", 1.0)),
    )
    partials = (product.partials,) if product.partials.shape[0] else ()
    inputs = [x_read] if many_x is x_read else [x_read, many_x]
    made = [operand for read in inputs for operand in read.temporaries]
    names = [operand.name for operand in made] or [x_read.x.name]
    call = Call(
        "quantized_gated_linear" if gated else "quantized_linear",
        [*names, *([] if residual is None else [residual.name])],
        [y.name, *(operand.name for operand in partials)],
        tuple(product.uses.values()),
        {"activation": product.activation, "alpha": product.alpha},
        product.launches(),
        takes_views=True,
        in_place=() if residual is None else ((0, len(names)),),
        adaptable=product.adaptable,
    )
    before = [read.call for read in inputs if read.call is not None]
    return Lowering((*before, call), (*made, *partials))


def _fits(op: Op, context: Context) -> bool:
    if any(not w.constant or len(w.shape) != 2 for w in matrices(op)):
        return False
    if op.kind == "castiron.GatedLinear" and not biases_in_pairs(op):
        return False
    return form_of(op, context) is not None


def _cost(op: Op, context: Context, tokens: int) -> float:
    form = form_of(op, context)
    assert form is not None, "accepted"
    elements = sum(element_count(w.shape, tokens) for w in matrices(op))
    rows = element_count(op.required(0).shape[:1], tokens)
    target = context.target
    rate = target.matrix_flops * (1.0 if form.math == "half" else 2.0)
    return max(form.w_bytes * elements / target.bandwidth, 2.0 * rows * elements / rate) * 0.99


TACTICS = (
    Tactic("cuda.quantized_linear", "castiron.Linear", "cuda", _fits, _lower, _cost, linear),
    Tactic("cuda.quantized_gated_linear", "castiron.GatedLinear", "cuda", _fits, _lower, _cost, gated_linear),
)
