"""What products with picked matrices share: launches by counts of tokens, whatever holds the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..launch import Grid, KernelLaunch, TritonKernel, When, value
from ..tactic import Context, Operand
from .kernels.experts import expert_order
from .products import Arguments, tiling
from .tiles import STREAM_ROWS, Product, RowClass, StreamTile
from .types import blocks_over, count, next_power_of_two, pointer, symbol

#: Ids that expert_order reads at a time, and tiles that it marks.
_ORDER_BLOCK = 1024
_ORDER_TILES = 128
#: Tokens of a launch, at most, as a multiple of the fewest: grids are of the most.
_GRID_RANGE = 4


@dataclass(frozen=True, kw_only=True)
class ExpertProduct(ABC):
    """One product; subclasses know its weights and their kernels.

    Attributes:
        shape: of one expert's product. ids: [T, k].
        shared_x: x has one row for all experts of a token.
    """

    context: Context
    shape: Product
    ids: Operand
    y: Operand
    shared_x: bool
    has_bias: bool
    activation: str

    @abstractmethod
    def all_classes(self) -> tuple[RowClass, ...]:
        """The tiles of up to ``most_tokens`` tokens, beyond those of `stream`."""

    @abstractmethod
    def operands(self) -> Arguments:
        """x and the weights, as kernels take them first. An absent bias gets the address of ``y``."""

    @abstractmethod
    def stream(self) -> tuple[Any, StreamTile, Mapping[str, Any]]:
        """The kernel for few tokens, its tile, and what it takes of the constants beside those of all."""

    @abstractmethod
    def tiled(self) -> tuple[Any, Mapping[str, Any]]:
        """The kernel for many, and its constants."""

    @property
    def most_tokens(self) -> int:
        """Of any step."""
        tokens, limits = self.ids.shape[0], self.context.limits
        if isinstance(tokens, int):
            return tokens
        return limits.max_logit_rows if tokens == "N" else limits.max_num_tokens

    def classes(self) -> tuple[RowClass, ...]:
        """The tiles by counts of tokens that steps have."""
        classes = self.all_classes()
        return classes if isinstance(self.ids.shape[0], str) else classes[-1:]

    def tiles(self, tokens: int, block_m: int) -> int:
        """At most, as ``tiles_before`` in kernels/experts.py counts them."""
        return (tokens * self.shape.picks + self.shape.experts * (block_m - 1)) // block_m

    @property
    def temporaries(self) -> tuple[Operand, ...]:
        """The rows of each tile, and each tile's expert, with room for any class."""
        tiles = [(self.tiles(c.high, c.tile.block_m), c.tile.block_m) for c in self.classes()]
        if not tiles:
            return ()
        rows = max(number * block_m for number, block_m in tiles)
        most = max(number for number, _ in tiles)
        name = self.y.name
        return (Operand(f"{name}.order", (rows,), "i32"), Operand(f"{name}.tile_experts", (most,), "i32"))

    def launches(self) -> Iterator[KernelLaunch]:
        """Those of every class, each with its condition."""
        tokens = self.ids.shape[0]
        if isinstance(tokens, str) or tokens <= STREAM_ROWS:
            yield self._stream_launch()
        for one in self.classes():
            low = one.low if isinstance(tokens, str) else one.high
            while low <= one.high:
                high = min(one.high, _GRID_RANGE * low)
                yield from self._tiled_launches(one, low, high)
                low = high + 1

    def _stream_launch(self) -> KernelLaunch:
        function, tile, constants = self.stream()
        constants = {
            **constants,
            "BLOCK_PAIRS": next_power_of_two(STREAM_ROWS * self.shape.picks),
            "BLOCK_M": STREAM_ROWS,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "WARPS": tile.warps,
        }
        pairs = blocks_over(self.ids.shape[0], 1, self.shape.picks)
        grid = (Grid(times=-(-self.shape.n // tile.block_n)), pairs)
        when = self._when(1, STREAM_ROWS)
        return self._launch(function, ("ids",), constants, grid, when, tile.warps, tile.stages)

    def _tiled_launches(self, of_class: RowClass, low: int, high: int) -> Iterator[KernelLaunch]:
        tile, shape, when = of_class.tile, self.shape, self._when(low, high)
        given = self._rows()
        names = ("ids", "order", "tile_experts", "tokens")
        order = TritonKernel(
            expert_order,
            {name: given[name][0] for name in names},
            {
                "PICKS": shape.picks,
                "EXPERTS": shape.experts,
                "BLOCK_M": tile.block_m,
                "BLOCK": min(_ORDER_BLOCK, next_power_of_two(of_class.high * shape.picks)),
                "BLOCK_TILES": _ORDER_TILES,
            },
            num_stages=1,
        )
        args = tuple(given[name][1] for name in names)
        yield KernelLaunch(order, (Grid(times=shape.experts),), args, when)
        function, constants = self.tiled()
        columns = -(-shape.n // tile.block_n)
        grid = (Grid(times=columns * self.tiles(high, tile.block_m)),)
        constants = {**constants, **tiling(tile)}
        rows = ("order", "tile_experts")
        yield self._launch(function, rows, constants, grid, when, tile.warps, tile.stages)

    def _rows(self) -> Arguments:
        """Which rows there are, and which expert each one picks."""
        return {
            "ids": ("*i32", value(self.ids.name)),
            "order": ("*i32", value(f"{self.y.name}.order")),
            "tile_experts": ("*i32", value(f"{self.y.name}.tile_experts")),
            "y": (pointer(self.y.dtype), value(self.y.name)),
            "tokens": ("i32", count(self.ids.shape[0])),
        }

    def _when(self, low: int, high: int) -> When | None:
        tokens = self.ids.shape[0]
        return When(symbol(tokens), low, high) if isinstance(tokens, str) else None

    def _launch(
        self,
        function: Any,
        names: tuple[str, ...],
        constants: Mapping[str, Any],
        grid: tuple[Grid, ...],
        when: When | None,
        warps: int,
        stages: int,
    ) -> KernelLaunch:
        rows = self._rows()
        given = {**self.operands(), **{name: rows[name] for name in (*names, "y", "tokens")}}
        own = {
            "N": self.shape.n,
            "K": self.shape.k,
            "EXPERTS": self.shape.experts,
            "PICKS": self.shape.picks,
            "SHARED_X": self.shared_x,
            "GATED": self.shape.gated,
            "ACTIVATION": self.activation,
            "HAS_BIAS": self.has_bias,
        }
        kernel = TritonKernel(
            function,
            {name: kind for name, (kind, _) in given.items()},
            {**own, **constants},
            num_warps=warps,
            num_stages=stages,
            hot=True,
        )
        return KernelLaunch(kernel, grid, tuple(param for _, param in given.values()), when)
