"""Matrix products with weights: Linear and GatedLinear with their epilogues, by classes of row counts."""

from __future__ import annotations

from dataclasses import dataclass

from ..launch import KernelLaunch, row_stride, value, weight
from ..reading import biases_in_pairs, matrix_elements
from ..tactic import Call, Context, Lowering, Op, Operand, Tactic, WeightUse, element_count
from .kernels.linear import linear_stream, linear_tile
from .kernels.linear_tma import linear_tma
from .products import Arguments, MatrixProduct, tiling
from .reference_ops import gated_linear, linear
from .tiles import Product, RowClass, row_classes, stream_tile
from .types import blocks_over, count, pointer

_BYTES = {"f32": 4, "bf16": 2, "f16": 2}


@dataclass(frozen=True, kw_only=True)
class _Product(MatrixProduct):
    def all_classes(self) -> tuple[RowClass, ...]:
        return row_classes(self.context.target, self.shape, self.most_rows)

    def arguments(self, y: Operand) -> Arguments:
        residual = self.residual or self.y
        return {
            "x": (pointer(self.read.dtype), value(self.read.name)),
            "w": (pointer(self.context.half), weight(0)),
            "bias": ("*fp32", weight(1)) if self.has_bias else (pointer(y.dtype), value(y.name)),
            "residual": (pointer(residual.dtype), value(residual.name)),
            "y": (pointer(y.dtype), value(y.name)),
            "rows": ("i32", count(self.rows)),
            "x_stride": ("i32", row_stride(self.read.name)),
            "residual_stride": ("i32", row_stride(residual.name)),
        }

    def stream(self) -> KernelLaunch:
        tile = stream_tile(self.context.target, self.shape)
        return self.stream_launch(linear_stream, tile, {"K": self.shape.k})

    def tiled(self, of_class: RowClass) -> tuple[KernelLaunch, ...]:
        tile = of_class.tile
        if not tile.tma:
            return self.tiled_launches(linear_tile, of_class, {"K": self.shape.k})
        given = self.arguments(self.y)
        unstrided = {name: argument for name, argument in given.items() if name != "x_stride"}
        constants = {"K": self.shape.k, **tiling(tile), "SPECIALIZE": tile.specialize}
        grid = blocks_over(self.rows, tile.block_m, -(-self.shape.n // tile.block_n), per_sm=1)
        rows = (of_class.low, of_class.high)
        return (self.launch(linear_tma, unstrided, constants, grid, rows, tile.warps, tile.stages),)


def _lower(product: _Product, name: str, weights: list[WeightUse]) -> Lowering:
    temporaries = (product.partials,) if product.partials.shape[0] else ()
    residual = [] if product.residual is None else [product.residual.name]
    call = Call(
        name,
        [product.read.name, *residual],
        [product.y.name, *(operand.name for operand in temporaries)],
        weights,
        {"activation": product.activation, "alpha": product.alpha},
        product.launches(),
        # The accelerator wants rows at multiples of 16 bytes, which a column view need not have.
        takes_views=not any(rows.tile.tma for rows in product.classes()),
        in_place=((0, 1),) if residual else (),
        adaptable=product.adaptable,
    )
    return Lowering((call,), temporaries)


def _lower_linear(op: Op, context: Context) -> Lowering:
    x, w, bias = op.required(0), op.required(1), op.input(2)
    weights = [WeightUse((w.name,), "matrix")]
    if bias is not None:
        weights.append(WeightUse((bias.name,), "vector"))
    product = _Product(
        name=op.outputs[0].name,
        shape=Product(int(w.shape[0]), int(w.shape[1]), False, _BYTES[x.dtype]),
        context=context,
        read=x,
        y=op.outputs[0],
        residual=op.input(3),
        has_bias=bias is not None,
        activation=str(op.attrs.get("activation", "none")),
        alpha=float(op.attrs.get("alpha", 1.0)),
    )
    return _lower(product, "linear", weights)


def _lower_gated(op: Op, context: Context) -> Lowering:
    x, gate, up = (op.required(i) for i in range(3))
    gate_bias, up_bias = op.input(3), op.input(4)
    weights = [WeightUse((gate.name, up.name), "matrix")]
    if gate_bias is not None and up_bias is not None:
        weights.append(WeightUse((gate_bias.name, up_bias.name), "vector"))
    product = _Product(
        name=op.outputs[0].name,
        shape=Product(int(gate.shape[0]), int(gate.shape[1]), True, _BYTES[x.dtype]),
        context=context,
        read=x,
        y=op.outputs[0],
        residual=None,
        has_bias=len(weights) == 2,
        activation=str(op.attrs["activation"]),
        alpha=1.0,
    )
    return _lower(product, "gated_linear", weights)


def _fits(op: Op, context: Context) -> bool:
    x, w = op.required(0), op.required(1)
    return len(x.shape) == 2 and not x.constant and len(w.shape) == 2 and w.constant


def _gated_fits(op: Op, context: Context) -> bool:
    return _fits(op, context) and biases_in_pairs(op)


def _cost(op: Op, context: Context, tokens: int) -> float:
    elements = matrix_elements(op)
    rows = element_count(op.required(0).shape[:1], tokens)
    target = context.target
    return max(2.0 * elements / target.bandwidth, 2.0 * rows * elements / target.matrix_flops)


TACTICS = (
    Tactic("cuda.linear", "castiron.Linear", "cuda", _fits, _lower_linear, _cost, linear),
    Tactic(
        "cuda.gated_linear", "castiron.GatedLinear", "cuda", _gated_fits, _lower_gated, _cost, gated_linear
    ),
)
