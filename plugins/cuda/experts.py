"""Products whose matrix each row's router picks: ExpertLinear and ExpertGatedLinear, by counts of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..launch import Grid, KernelLaunch, Param, TritonKernel, When, value, weight
from ..tactic import Call, Context, Lowering, Op, Operand, Tactic, WeightUse, element_count
from .kernels.experts import expert_order, expert_stream, expert_tile
from .products import tiling
from .reference_experts import expert_gated_linear, expert_linear
from .tiles import STREAM_ROWS, Product, RowClass, row_classes, stream_tile
from .types import blocks_over, count, next_power_of_two, pointer, symbol

_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
#: Ids that expert_order reads at a time.
_ORDER_BLOCK = 1024
#: Tokens of a launch, at most, as a multiple of the fewest: grids are of the most.
_GRID_RANGE = 4


@dataclass(frozen=True)
class _Product:
    """One product. ``shared_x``: x has one row for all experts of a token."""

    context: Context
    shape: Product
    x: Operand
    ids: Operand
    y: Operand
    shared_x: bool
    has_bias: bool
    activation: str

    @property
    def most_tokens(self) -> int:
        """Of any step."""
        tokens, limits = self.ids.shape[0], self.context.limits
        if isinstance(tokens, int):
            return tokens
        return limits.max_logit_rows if tokens == "N" else limits.max_num_tokens

    def classes(self) -> tuple[RowClass, ...]:
        """The tiles by counts of tokens, beyond those of expert_stream."""
        classes = row_classes(self.context.target, self.shape, self.most_tokens)
        return classes if isinstance(self.ids.shape[0], str) else classes[-1:]

    def tiles(self, tokens: int, block_m: int) -> int:
        """At most, as `tiles_before` in kernels/experts.py counts them."""
        return (tokens * self.shape.picks + self.shape.experts * (block_m - 1)) // block_m

    @property
    def temporaries(self) -> tuple[Operand, ...]:
        """The rows of each tile, and each tile's expert, with room for any class."""
        tiles = [(self.tiles(c.high, c.tile.block_m), c.tile.block_m) for c in self.classes()]
        if not tiles:
            return ()
        rows = max(count * block_m for count, block_m in tiles)
        most = max(count for count, _ in tiles)
        name = self.y.name
        return (Operand(f"{name}.order", (rows,), "i32"), Operand(f"{name}.tile_experts", (most,), "i32"))

    def launches(self) -> Iterator[KernelLaunch]:
        """Those of every class, each with its condition."""
        tokens = self.ids.shape[0]
        if isinstance(tokens, str) or tokens <= STREAM_ROWS:
            yield self._stream()
        for one in self.classes():
            low = one.low
            while low <= one.high:
                high = min(one.high, _GRID_RANGE * low)
                yield from self._tiled(one, low, high)
                low = high + 1

    def _stream(self) -> KernelLaunch:
        tile = stream_tile(self.context.target, self.shape)
        constants = {
            "BLOCK_PAIRS": next_power_of_two(STREAM_ROWS * self.shape.picks),
            "BLOCK_M": STREAM_ROWS,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "WARPS": tile.warps,
        }
        names = ("x", "ids", "w", "bias", "y", "tokens")
        pairs = blocks_over(self.ids.shape[0], 1, self.shape.picks)
        grid = (Grid(times=-(-self.shape.n // tile.block_n)), pairs)
        return self._launch(expert_stream, names, constants, grid, 1, STREAM_ROWS, tile.warps, tile.stages)

    def _tiled(self, of_class: RowClass, low: int, high: int) -> Iterator[KernelLaunch]:
        tile, shape = of_class.tile, self.shape
        sizes = {"PICKS": shape.picks, "EXPERTS": shape.experts, "BLOCK_M": tile.block_m}
        block = min(_ORDER_BLOCK, next_power_of_two(of_class.high * shape.picks))
        order = TritonKernel(
            expert_order,
            {"ids": "*i32", "order": "*i32", "tile_experts": "*i32", "tokens": "i32"},
            {**sizes, "BLOCK": block, "BLOCK_TILES": 128},
            num_stages=1,
        )
        given = self._arguments()
        args = tuple(given[name][1] for name in order.types)
        yield KernelLaunch(order, (Grid(times=shape.experts),), args, self._when(low, high))
        names = ("x", "order", "tile_experts", "w", "bias", "y", "tokens")
        columns = -(-shape.n // tile.block_n)
        grid = Grid(times=columns * self.tiles(high, tile.block_m))
        yield self._launch(expert_tile, names, tiling(tile), (grid,), low, high, tile.warps, tile.stages)

    def _arguments(self) -> dict[str, tuple[str, Param]]:
        """All that a kernel may ask for. An absent bias gets the address of ``y``: it is not read."""
        y = (pointer(self.y.dtype), value(self.y.name))
        return {
            "x": (pointer(self.x.dtype), value(self.x.name)),
            "ids": ("*i32", value(self.ids.name)),
            "order": ("*i32", value(f"{self.y.name}.order")),
            "tile_experts": ("*i32", value(f"{self.y.name}.tile_experts")),
            "w": (pointer(self.context.half), weight(0)),
            "bias": ("*fp32", weight(1)) if self.has_bias else y,
            "y": y,
            "tokens": ("i32", count(self.ids.shape[0])),
        }

    def _when(self, low: int, high: int) -> When | None:
        tokens = self.ids.shape[0]
        return When(symbol(tokens), low, high) if isinstance(tokens, str) else None

    def _launch(
        self,
        function: Any,
        names: tuple[str, ...],
        constants: dict[str, int],
        grid: tuple[Grid, ...],
        low: int,
        high: int,
        warps: int,
        stages: int,
    ) -> KernelLaunch:
        given = self._arguments()
        shape = self.shape
        own = {
            "N": shape.n,
            "K": shape.k,
            "EXPERTS": shape.experts,
            "PICKS": shape.picks,
            "SHARED_X": self.shared_x,
            "GATED": shape.gated,
            "ACTIVATION": self.activation,
            "HAS_BIAS": self.has_bias,
        }
        kernel = TritonKernel(
            function,
            {name: given[name][0] for name in names},
            own | constants,
            num_warps=warps,
            num_stages=stages,
            hot=True,
        )
        return KernelLaunch(kernel, grid, tuple(given[name][1] for name in names), self._when(low, high))


def _lower(op: Op, context: Context) -> Lowering:
    gated = op.kind == "castiron.ExpertGatedLinear"
    x, ids, y = op.required(0), op.required(1), op.outputs[0]
    matrices = [op.required(2), op.required(3)] if gated else [op.required(2)]
    biases = [b for b in (op.inputs[4:6] if gated else op.inputs[3:4]) if b is not None]
    weights = [WeightUse(tuple(w.name for w in matrices), "matrix")]
    if biases:
        weights.append(WeightUse(tuple(b.name for b in biases), "vector"))
    experts = int(op.attrs["experts"])
    rows, inputs = (int(dim) for dim in matrices[0].shape)
    sizes = {"experts": experts, "picks": int(ids.shape[1])}
    product = _Product(
        context,
        Product(rows // experts, inputs, gated, _BYTES[x.dtype], **sizes),
        x,
        ids,
        y,
        shared_x=len(x.shape) == 2,
        has_bias=bool(biases),
        activation=str(op.attrs.get("activation", "none")),
    )
    temporaries = product.temporaries
    call = Call(
        "expert_gated_linear" if gated else "expert_linear",
        [x.name, ids.name],
        [y.name, *(operand.name for operand in temporaries)],
        weights,
        {"experts": experts, "activation": product.activation},
        tuple(product.launches()),
    )
    return Lowering((call,), temporaries)


def _fits(op: Op, context: Context) -> bool:
    x, ids, w = op.required(0), op.required(1), op.required(2)
    return (
        not x.constant
        and w.constant
        and len(w.shape) == 2
        and len(x.shape) in (2, 3)
        and len(ids.shape) == 2
        and isinstance(ids.shape[1], int)
        and ids.dtype == "i32"
    )


def _gated_fits(op: Op, context: Context) -> bool:
    return _fits(op, context) and (op.input(4) is None) == (op.input(5) is None)


def _cost(op: Op, context: Context, tokens: int) -> float:
    """The larger of reading the matrices of all experts once and the arithmetic of those picked."""
    matrices = [o for o in op.inputs if o is not None and o.constant and len(o.shape) == 2]
    elements = sum(element_count(o.shape, tokens) for o in matrices)
    pairs = element_count(op.required(1).shape, tokens)
    target = context.target
    arithmetic = 2.0 * pairs * elements / int(op.attrs["experts"])
    return max(2.0 * elements / target.bandwidth, arithmetic / target.matrix_flops)


TACTICS = (
    Tactic("cuda.expert_linear", "castiron.ExpertLinear", "cuda", _fits, _lower, _cost, expert_linear),
    Tactic(
        "cuda.expert_gated_linear",
        "castiron.ExpertGatedLinear",
        "cuda",
        _gated_fits,
        _lower,
        _cost,
        expert_gated_linear,
    ),
)
