"""What products with weights of every kind share: classes of row counts, sums of parts, epilogues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..launch import Grid, KernelLaunch, Param, TritonKernel, When, value
from ..tactic import Adaptable, Adapted, Context, Dim, LoraPlace, Operand
from .kernels.linear import linear_reduce
from .lora import lora_launches
from .tiles import STREAM_ROWS, Product, RowClass, StreamTile, Tile
from .types import blocks_over, symbol

#: Row tiles of neighbouring blocks that share the weights they read.
_GROUP_ROW_TILES = 8
_REDUCE_COLUMNS = 512
#: Kernel parameters: Triton type and launch argument by name.
Arguments = Mapping[str, tuple[str, Param]]


@dataclass(frozen=True, kw_only=True)
class MatrixProduct(ABC):
    """One product with its epilogue; subclasses know its operands and their kernels.

    ``read``: what is multiplied, before any rounding. ``name``: of the result, for what is kept beside it.
    """

    name: str
    shape: Product
    context: Context
    read: Operand
    y: Operand
    residual: Operand | None
    has_bias: bool
    activation: str
    alpha: float

    @property
    def rows(self) -> Dim:
        """Rows of x."""
        return self.read.shape[0]

    @property
    def inputs(self) -> int:
        """Of a row."""
        return int(self.read.shape[1])

    @property
    def columns(self) -> int:
        """Of all its matrices together."""
        return self.shape.n * self.shape.matrices

    @property
    def adaptable(self) -> Adaptable | None:
        """Itself where its rows are those of a step."""
        return self if self.rows in ("T", "N") else None

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
        return Operand(f"{self.name}.partials", (max(sums, default=0), self.columns))

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

    def adapted(self, place: LoraPlace) -> Adapted:
        """With adapters: added to the result where that is the same, else to the sums before the epilogue.

        Rows without an adapter get the bits that they have without these launches.
        """
        x = self.read
        if self.activation == "none" and not self.shape.gated:
            lora, shrunk = lora_launches(x, self.y, self.inputs, self.alpha, self.context, place)
            return Adapted((*self.launches(), *lora), (x.name,), (shrunk,))
        sums = Operand(f"{self.name}.sums", (self.rows, self.columns))
        product = replace(self, y=sums, residual=None, has_bias=False, activation="sums", alpha=1.0)
        lora, shrunk = lora_launches(x, sums, self.inputs, 1.0, self.context, place)
        finish = self._reduce(sums, {"SPLITS": 1, "SPLIT_ROWS": 1}, None)
        return Adapted((*product.launches(), *lora, finish), (x.name,), (sums, shrunk))

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
        rows: tuple[int, int] | None,
        warps: int = 4,
        stages: int = 3,
        hot: bool = True,
    ) -> KernelLaunch:
        """A launch for the row counts ``rows``, both ends included, with the epilogue's constants added.

        None: for any.
        """
        kernel = TritonKernel(
            function,
            {name: kind for name, (kind, _) in arguments.items()},
            {**self.epilogue(), **constants},
            num_warps=warps,
            num_stages=stages,
            hot=hot,
        )
        # A fixed row count has one class and needs no condition.
        when = When(symbol(self.rows), *rows) if isinstance(self.rows, str) and rows is not None else None
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
        if tile.splits > 1:  # linear_reduce has the epilogue: products that differ in theirs share a kernel
            constants |= {"ACTIVATION": "none", "ALPHA": 1.0, "HAS_BIAS": False, "HAS_RESIDUAL": False}
        arguments = self.arguments(self.y if tile.splits == 1 else self.partials)
        columns = -(-self.shape.n // tile.block_n)
        grid = blocks_over(self.rows, tile.block_m, columns * tile.splits)
        launch = self.launch(function, arguments, constants, grid, rows, tile.warps, tile.stages)
        return (launch,) if tile.splits == 1 else (launch, self._reduce(self.partials, split, rows))

    def _reduce(
        self, partials: Operand, split: Mapping[str, int], rows: tuple[int, int] | None
    ) -> KernelLaunch:
        names = ("bias", "residual", "y", "rows", "residual_stride")
        given = self.arguments(self.y)
        arguments = {"partials": ("*fp32", value(partials.name))} | {name: given[name] for name in names}
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
