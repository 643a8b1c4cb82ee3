"""What products with weights of every kind share: classes of row counts, sums of parts, epilogues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..launch import Grid, KernelLaunch, Param, TritonKernel, When, value
from ..tactic import Context, Dim, Operand
from .kernels.linear import linear_reduce
from .tiles import STREAM_ROWS, Product, RowClass, StreamTile, Tile
from .types import blocks_over, symbol

#: Row tiles of neighbouring blocks that share the weights they read.
_GROUP_ROW_TILES = 8
_REDUCE_COLUMNS = 512
#: Kernel parameters: Triton type and launch argument by name.
Arguments = Mapping[str, tuple[str, Param]]


@dataclass(frozen=True, kw_only=True)
class MatrixProduct(ABC):
    """One product with its epilogue; subclasses know its operands and their kernels."""

    shape: Product
    context: Context
    y: Operand
    residual: Operand | None
    has_bias: bool
    activation: str
    alpha: float

    @property
    @abstractmethod
    def rows(self) -> Dim:
        """Rows of x."""

    @abstractmethod
    def all_classes(self) -> tuple[RowClass, ...]:
        """The tiles of up to ``most_rows`` rows."""

    @abstractmethod
    def arguments(self, y: Operand) -> Arguments:
        """All that a kernel may ask for, with the result in ``y``.

        An absent bias or residual gets the address of ``y``: any will do, it is not read.
        """

    @abstractmethod
    def stream(self) -> KernelLaunch:
        """The launch for few rows."""

    @abstractmethod
    def tiled(self, of_class: RowClass) -> tuple[KernelLaunch, ...]:
        """The launches for the rows of a class."""

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
        """The tiles by row counts that steps have."""
        classes = self.all_classes()
        # A fixed row count needs its own class alone.
        return classes if isinstance(self.rows, str) else classes[-1:]

    def launches(self) -> tuple[KernelLaunch, ...]:
        """Those of every class of row counts, each with its condition."""
        few = isinstance(self.rows, str) or self.rows <= STREAM_ROWS
        many = [launch for rows in self.classes() for launch in self.tiled(rows)]
        return (*([self.stream()] if few else []), *many)

    def epilogue(self) -> dict[str, Any]:
        """What all of the kernels take of the constants."""
        return {
            "N": self.shape.n,
            "GATED": self.shape.gated,
            "ACTIVATION": self.activation,
            "ALPHA": self.alpha,
            "HAS_BIAS": self.has_bias,
            "HAS_RESIDUAL": self.residual is not None,
        }

    def launch(
        self,
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
            {**self.epilogue(), **constants},
            num_warps=warps,
            num_stages=stages,
            hot=hot,
        )
        # A fixed row count has one class and needs no condition.
        when = When(symbol(self.rows), *rows) if isinstance(self.rows, str) else None
        return KernelLaunch(kernel, (grid,), tuple(param for _, param in arguments.values()), when)

    def stream_launch(self, function: Any, tile: StreamTile, constants: Mapping[str, Any]) -> KernelLaunch:
        """``function`` for up to STREAM_ROWS rows, by ``tile``."""
        constants = {
            **constants,
            "BLOCK_M": STREAM_ROWS,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "WARPS": tile.warps,
        }
        grid = Grid(times=-(-self.shape.n // tile.block_n))
        rows = (1, STREAM_ROWS)
        return self.launch(function, self.arguments(self.y), constants, grid, rows, tile.warps, tile.stages)

    def tiled_launches(
        self, function: Any, of_class: RowClass, constants: Mapping[str, Any]
    ) -> tuple[KernelLaunch, ...]:
        """``function`` for a class's rows; a tile that cuts K writes ``partials``, which are added then."""
        tile, rows = of_class.tile, (of_class.low, of_class.high)
        split = {"SPLITS": tile.splits, "SPLIT_ROWS": of_class.high if tile.splits > 1 else 1}
        constants = {**constants, **tiling(tile), **split}
        arguments = self.arguments(self.y if tile.splits == 1 else self.partials)
        columns = -(-self.shape.n // tile.block_n)
        grid = blocks_over(self.rows, tile.block_m, columns * tile.splits)
        launch = self.launch(function, arguments, constants, grid, rows, tile.warps, tile.stages)
        return (launch,) if tile.splits == 1 else (launch, self._reduce(split, rows))

    def _reduce(self, split: Mapping[str, int], rows: tuple[int, int]) -> KernelLaunch:
        names = ("bias", "residual", "y", "rows", "residual_stride")
        given = self.arguments(self.y)
        arguments = {"partials": ("*fp32", value(self.partials.name))} | {name: given[name] for name in names}
        constants = {**split, "BLOCK_N": _REDUCE_COLUMNS}
        grid = blocks_over(self.rows, 1, -(-self.shape.n // _REDUCE_COLUMNS))
        return self.launch(linear_reduce, arguments, constants, grid, rows, hot=False)


def tiling(tile: Tile) -> dict[str, int]:
    """A tile as kernels take it."""
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": _GROUP_ROW_TILES,
    }
