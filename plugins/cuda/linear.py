"""Matrix products with weights: Linear and GatedLinear with their epilogues, by classes of row counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..launch import Grid, KernelLaunch, Param, TritonKernel, When, row_stride, value, weight
from ..tactic import Call, Context, Dim, Lowering, Op, Operand, Tactic, WeightUse, element_count
from .kernels.linear import linear_reduce, linear_stream, linear_tile
from .kernels.linear_tma import linear_tma
from .reference_ops import gated_linear, linear
from .tiles import STREAM_ROWS, Product, RowClass, row_classes, stream_tile
from .types import blocks_over, count, pointer, symbol

_REDUCE_COLUMNS = 512
_GROUP_ROW_TILES = 8
_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
#: Kernel parameters: Triton type and launch argument by name.
Arguments = Mapping[str, tuple[str, Param]]


@dataclass(frozen=True)
class _Product:
    """One product with its operands and its epilogue."""

    shape: Product
    context: Context
    x: Operand
    y: Operand
    residual: Operand | None
    has_bias: bool
    activation: str
    alpha: float

    @property
    def rows(self) -> Dim:
        return self.x.shape[0]

    @property
    def most_rows(self) -> int:
        """The largest row count of any step."""
        if isinstance(self.rows, int):
            return self.rows
        limits = self.context.limits
        return limits.max_logit_rows if self.rows == "N" else limits.max_num_tokens

    @property
    def partials(self) -> Operand:
        """The sums of parts of K, with room for the largest class: classes never run in the same step."""
        sums = [c.tile.splits * c.high for c in self.classes() if c.tile.splits > 1]
        return Operand(f"{self.y.name}.partials", (max(sums, default=0), self.shape.n * self.shape.matrices))

    def classes(self) -> tuple[RowClass, ...]:
        classes = row_classes(self.context.target, self.shape, self.most_rows)
        # A fixed row count needs its own class alone.
        return classes if isinstance(self.rows, str) else classes[-1:]

    def epilogue(self) -> dict[str, Any]:
        return {
            "N": self.shape.n,
            "GATED": self.shape.gated,
            "ACTIVATION": self.activation,
            "ALPHA": self.alpha,
            "HAS_BIAS": self.has_bias,
            "HAS_RESIDUAL": self.residual is not None,
        }

    def arguments(self, y: Operand) -> Arguments:
        """An absent bias or residual gets the address of ``y``: any will do, it is not read."""
        residual = self.residual or self.y
        return {
            "x": (pointer(self.x.dtype), value(self.x.name)),
            "w": (pointer(self.context.half), weight(0)),
            "bias": ("*fp32", weight(1)) if self.has_bias else (pointer(y.dtype), value(y.name)),
            "residual": (pointer(residual.dtype), value(residual.name)),
            "y": (pointer(y.dtype), value(y.name)),
            "rows": ("i32", count(self.rows)),
            "x_stride": ("i32", row_stride(self.x.name)),
            "residual_stride": ("i32", row_stride(residual.name)),
        }


def _launch(
    product: _Product,
    function: Any,
    arguments: Arguments,
    constants: Mapping[str, Any],
    grid: Grid,
    rows: tuple[int, int],
    warps: int = 4,
    stages: int = 3,
    hot: bool = True,
) -> KernelLaunch:
    """A launch for the row counts ``rows``, both ends included, with the epilogue's constants added."""
    kernel = TritonKernel(
        function,
        {name: kind for name, (kind, _) in arguments.items()},
        {**product.epilogue(), **constants},
        num_warps=warps,
        num_stages=stages,
        hot=hot,
    )
    # A fixed row count has one class and needs no condition.
    when = When(symbol(product.rows), *rows) if isinstance(product.rows, str) else None
    return KernelLaunch(kernel, (grid,), tuple(param for _, param in arguments.values()), when)


def _stream(product: _Product) -> KernelLaunch:
    tile = stream_tile(product.context.target, product.shape)
    constants = {
        "K": product.shape.k,
        "BLOCK_M": STREAM_ROWS,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "WARPS": tile.warps,
    }
    grid = Grid(times=-(-product.shape.n // tile.block_n))
    arguments = product.arguments(product.y)
    rows = (1, STREAM_ROWS)
    return _launch(product, linear_stream, arguments, constants, grid, rows, tile.warps, tile.stages)


def _tiled(product: _Product, of_class: RowClass) -> tuple[KernelLaunch, ...]:
    tile, rows = of_class.tile, (of_class.low, of_class.high)
    constants: dict[str, Any] = {
        "K": product.shape.k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": _GROUP_ROW_TILES,
    }
    columns = -(-product.shape.n // tile.block_n)
    if tile.tma:
        given = product.arguments(product.y)
        unstrided = {name: argument for name, argument in given.items() if name != "x_stride"}
        constants["SPECIALIZE"] = tile.specialize
        grid = blocks_over(product.rows, tile.block_m, columns, per_sm=1)
        return (_launch(product, linear_tma, unstrided, constants, grid, rows, tile.warps, tile.stages),)
    split = {"SPLITS": tile.splits, "SPLIT_ROWS": of_class.high if tile.splits > 1 else 1}
    constants |= split
    arguments = product.arguments(product.y if tile.splits == 1 else product.partials)
    grid = blocks_over(product.rows, tile.block_m, columns * tile.splits)
    launch = _launch(product, linear_tile, arguments, constants, grid, rows, tile.warps, tile.stages)
    return (launch,) if tile.splits == 1 else (launch, _reduce(product, split, rows))


def _reduce(product: _Product, split: Mapping[str, int], rows: tuple[int, int]) -> KernelLaunch:
    names = ("bias", "residual", "y", "rows", "residual_stride")
    given = product.arguments(product.y)
    arguments = {"partials": ("*fp32", value(product.partials.name))} | {name: given[name] for name in names}
    constants = {**split, "BLOCK_N": _REDUCE_COLUMNS}
    grid = blocks_over(product.rows, 1, -(-product.shape.n // _REDUCE_COLUMNS))
    return _launch(product, linear_reduce, arguments, constants, grid, rows, hot=False)


def _lower(product: _Product, name: str, weights: list[WeightUse]) -> Lowering:
    launches: list[KernelLaunch] = []
    if isinstance(product.rows, str) or product.rows <= STREAM_ROWS:
        launches.append(_stream(product))
    for rows in product.classes():
        launches += _tiled(product, rows)
    temporaries = (product.partials,) if product.partials.shape[0] else ()
    residual = [] if product.residual is None else [product.residual.name]
    call = Call(
        name,
        [product.x.name, *residual],
        [product.y.name, *(operand.name for operand in temporaries)],
        weights,
        {"activation": product.activation, "alpha": product.alpha},
        tuple(launches),
        # The accelerator wants rows at multiples of 16 bytes, which a column view need not have.
        takes_views=not any(rows.tile.tma for rows in product.classes()),
        in_place=((0, 1),) if residual else (),
    )
    return Lowering((call,), temporaries)


def _lower_linear(op: Op, context: Context) -> Lowering:
    x, w, bias = op.required(0), op.required(1), op.input(2)
    weights = [WeightUse((w.name,), "matrix")]
    if bias is not None:
        weights.append(WeightUse((bias.name,), "vector"))
    product = _Product(
        Product(int(w.shape[0]), int(w.shape[1]), False, _BYTES[x.dtype]),
        context,
        x,
        op.outputs[0],
        op.input(3),
        bias is not None,
        str(op.attrs.get("activation", "none")),
        float(op.attrs.get("alpha", 1.0)),
    )
    return _lower(product, "linear", weights)


def _lower_gated(op: Op, context: Context) -> Lowering:
    x, gate, up = (op.required(i) for i in range(3))
    gate_bias, up_bias = op.input(3), op.input(4)
    weights = [WeightUse((gate.name, up.name), "matrix")]
    if gate_bias is not None and up_bias is not None:
        weights.append(WeightUse((gate_bias.name, up_bias.name), "vector"))
    shape = Product(int(gate.shape[0]), int(gate.shape[1]), True, _BYTES[x.dtype])
    activation = str(op.attrs["activation"])
    product = _Product(shape, context, x, op.outputs[0], None, len(weights) == 2, activation, 1.0)
    return _lower(product, "gated_linear", weights)


def _fits(op: Op, context: Context) -> bool:
    x, w = op.required(0), op.required(1)
    return len(x.shape) == 2 and not x.constant and len(w.shape) == 2 and w.constant


def _gated_fits(op: Op, context: Context) -> bool:
    return _fits(op, context) and (op.input(3) is None) == (op.input(4) is None)


def _cost(op: Op, context: Context, tokens: int) -> float:
    matrices = [o for o in op.inputs if o is not None and o.constant and len(o.shape) == 2]
    elements = sum(element_count(o.shape, tokens) for o in matrices)
    rows = element_count(op.required(0).shape[:1], tokens)
    target = context.target
    return max(2.0 * elements / target.bandwidth, 2.0 * rows * elements / target.matrix_flops)


TACTICS = (
    Tactic("cuda.linear", "castiron.Linear", "cuda", _fits, _lower_linear, _cost, linear),
    Tactic(
        "cuda.gated_linear", "castiron.GatedLinear", "cuda", _gated_fits, _lower_gated, _cost, gated_linear
    ),
)
