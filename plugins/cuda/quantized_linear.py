"""Matrix products with quantized weights: Linear and GatedLinear by classes of row counts."""

from __future__ import annotations

from dataclasses import dataclass

from ..launch import KernelLaunch, When, row_stride, value
from ..reading import biases, biases_in_pairs, matrices, matrix_elements
from ..tactic import Call, Context, Lowering, Op, Operand, Tactic, WeightUse, element_count
from .kernels.quantized_linear import quantized_stream, quantized_tile
from .kernels.scaled_linear import scaled_tile
from .products import Arguments, MatrixProduct, tiling
from .quantize import RoundedInput, float4_input, rounded_input
from .quantized_form import QuantizedForm, form_of
from .quantized_operands import QuantizedOperands, weight_uses
from .quantized_tiles import product_of, quantized_classes, quantized_stream_tile, scaled_classes
from .reference_ops import gated_linear, linear
from .tiles import STREAM_ROWS, RowClass
from .types import blocks_over, count, pointer, symbol


@dataclass(frozen=True, kw_only=True)
class _Product(MatrixProduct):
    """``operands``: with few rows; ``many_x``: x as it is read with many."""

    form: QuantizedForm
    operands: QuantizedOperands
    many_x: RoundedInput

    def all_classes(self) -> tuple[RowClass, ...]:
        if self.form.scaled:
            return scaled_classes(self.shape, self.most_rows)
        return quantized_classes(self.context.target, self.shape, self.form, self.most_rows)

    def arguments(self, y: Operand) -> Arguments:
        residual = self.residual or self.y
        return {
            **self.operands.arguments(y),
            "residual": (pointer(residual.dtype), value(residual.name)),
            "y": (pointer(y.dtype), value(y.name)),
            "rows": ("i32", count(self.rows)),
            "residual_stride": ("i32", row_stride(residual.name)),
        }

    def stream(self) -> KernelLaunch:
        tile = quantized_stream_tile(self.context.target, self.shape, self.form)
        return self.stream_launch(quantized_stream, tile, self.operands.constants(self.form.scales))

    def tiled(self, of_class: RowClass) -> tuple[KernelLaunch, ...]:
        if self.form.scaled:
            return (self._scaled(of_class),)
        return self.tiled_launches(quantized_tile, of_class, self.operands.constants(self.form.tile_scales))

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


def _lower(op: Op, context: Context) -> Lowering:
    form = form_of(op, context)
    assert form is not None, "accepted"
    gated = op.kind == "castiron.GatedLinear"
    x, y, w = op.required(0), op.outputs[0], op.required(1)
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
    uses = weight_uses(op, form, biases(op))
    product = _Product(
        name=y.name,
        form=form,
        shape=product_of(form, int(w.shape[0]), gated, x_bytes),
        context=context,
        read=x,
        operands=QuantizedOperands(context, form, x_read, uses),
        many_x=many_x,
        y=y,
        residual=residual,
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
        tuple(uses.values()),
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
    return biases_in_pairs(op) and form_of(op, context) is not None


def _cost(op: Op, context: Context, tokens: int) -> float:
    form = form_of(op, context)
    assert form is not None, "accepted"
    elements = matrix_elements(op)
    rows = element_count(op.required(0).shape[:1], tokens)
    target = context.target
    rate = target.matrix_flops * (1.0 if form.math == "half" else 2.0)
    return max(form.w_bytes * elements / target.bandwidth, 2.0 * rows * elements / rate) * 0.99


TACTICS = (
    Tactic("cuda.quantized_linear", "castiron.Linear", "cuda", _fits, _lower, _cost, linear),
    Tactic("cuda.quantized_gated_linear", "castiron.GatedLinear", "cuda", _fits, _lower, _cost, gated_linear),
)
