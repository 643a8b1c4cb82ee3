"""How a quantized product is computed: what meets in the matrix unit, and where scales are applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..reading import matrices
from ..tactic import Context, Op, Quant
from ..targets import Target

Math = Literal["half", "int8", "fp8"]
#: How x is stored for the product: as it is, as codes in numbers of its own (times a scale), or rounded.
XStorage = Literal["as it is", "codes", "values", "rounded"]
#: Fewest inputs of a step, by what is multiplied: words hold quarters of 16 inputs or more.
_LEAST_STEP = {"half": 16, "int8": 32, "fp8": 32}
_WORDS = ("int4", "fp4")
_BLOCK_FORMATS = ("nvfp4", "mxfp4", "mxfp8")
_RUN = {"int4": 32, "fp4": 16}
_EXPERTS = ("castiron.ExpertLinear", "castiron.ExpertGatedLinear")


@dataclass(frozen=True)
class QuantizedForm:
    """One product's choice.

    Attributes:
        quant: of the weights. math, scales, x_scales: as in kernels/quantized_sums.py, ``scales`` for few
            rows; ``tile_scales`` for many.
        x_storage: what a kernel before the product makes of x.
        x_format, x_group, x_scale: of the op.
        group: inputs that share a scale of weights, at most K.
        inputs: K.
        scaled: with many rows float4 meets float4 in the matrix unit, which applies the scales of blocks;
            what the others say is then about few rows.
    """

    quant: Quant
    math: Math
    scales: str
    tile_scales: str
    x_scales: Literal["none", "rows", "sums"]
    x_storage: XStorage
    x_format: str
    x_group: int
    x_scale: float
    group: int
    inputs: int
    scaled: bool = False

    @property
    def packed(self) -> bool:
        """Two codes a byte."""
        return self.quant.format in _WORDS

    @property
    def w_bytes(self) -> float:
        """Of a weight, without its scales."""
        return 0.5 if self.packed else 1.0

    @property
    def x_bytes(self) -> int:
        """Of an input as the product reads it."""
        return 2 if self.math == "half" else 1

    @property
    def least_step(self) -> int:
        """Fewest inputs of a step."""
        return 64 if self.packed else _LEAST_STEP[self.math]

    def most_step(self, scales: str) -> int:
        """Most inputs of a step, where sums must lie inside one group of a scale; 0: no limit."""
        limits = [self.group] if scales == "sums" else []
        if self.x_scales == "sums":
            limits.append(self.x_group)
        return min(limits, default=0)


def form_of(op: Op, context: Context) -> QuantizedForm | None:
    """The form of a product with quantized weights, or None where no kernel takes it."""
    x, quant = op.required(0), _quant_of(op)
    of_experts = op.kind in _EXPERTS
    ranks = (2, 3) if of_experts else (2,)
    if quant is None or context.half == "f32" or len(x.shape) not in ranks or x.constant:
        return None
    inputs = int(matrices(op)[0].shape[1])
    group = quant.group if 0 < quant.group < inputs else inputs
    x_format = str(op.attrs.get("x_format", ""))
    x_group = int(op.attrs.get("x_group", 0))
    x_group = x_group if 0 < x_group < inputs else 0
    x_scale = float(op.attrs.get("x_scale", 0.0))
    if quant.columns is not None and (x_format in _BLOCK_FORMATS or x_group):
        return None  # groups of x are of its own order, not of the codes'
    math = _math(quant, x_format, context.target)
    if math != "half" and not all(_is_step(size, inputs, 32) for size in (group, x_group or inputs)):
        math = "half"
    run = _RUN.get(quant.format, 16)
    if not _is_step(group, inputs, run):
        return None
    storage: XStorage = "as it is"
    x_scales: Literal["none", "rows", "sums"] = "none"
    if x_format:
        dynamic = x_scale == 0
        storage = "codes" if math != "half" else "values"
        if math == "half" and (x_format in _BLOCK_FORMATS or (x_group and dynamic)):
            storage = "rounded"
        if storage == "rounded":
            x_scales = "rows" if x_format == "nvfp4" and dynamic else "none"
        elif dynamic:
            x_scales = "sums" if x_group else "rows"
    few, many = _scales(quant, group, inputs, math)
    blocks = {"nvfp4": "e4m3", "mxfp4": "e8m0"}.get(x_format)
    # Rows that are picked are not fetched with their blocks' scales.
    scaled = few == blocks and context.target.compute_capability >= 100 and not of_experts
    return QuantizedForm(
        quant, math, few, many, x_scales, storage, x_format, x_group, x_scale, group, inputs, scaled
    )


def _quant_of(op: Op) -> Quant | None:
    """Of the weight, or of gate and up if they are alike."""
    quants = [operand.quant for operand in matrices(op)]
    first = quants[0]
    if first is None or len(quants) == 1:
        return first
    second = quants[1]
    if second is None:
        return None
    alike = (first.format, first.group, first.columns) == (second.format, second.group, second.columns)
    if not alike:
        return None
    scale_dtype: Literal["f32", "f16"] = "f16" if first.scale_dtype == second.scale_dtype == "f16" else "f32"
    offset = first.has_offset or second.has_offset
    return Quant(first.format, first.group, scale_dtype, offset, first.columns)


def _math(quant: Quant, x_format: str, target: Target) -> Math:
    if quant.has_offset:
        return "half"
    if x_format == quant.format == "int8":
        return "int8"
    if x_format == quant.format == "fp8" and target.compute_capability >= 89:
        return "fp8"
    return "half"


def _scales(quant: Quant, group: int, inputs: int, math: Math) -> tuple[str, str]:
    """Where weights are scaled, with few rows and with many.

    Scaling sums is exact, and with few rows it is cheap; with many, scaling the weights is cheaper.
    """
    if quant.format == "fp4" and group in (16, 32):
        kind = "e4m3" if group == 16 else "e8m0"
        return kind, kind
    if quant.has_offset:
        return "weights", "weights"
    if group == inputs:
        return "rows", "rows"
    if math != "half":
        return "sums", "sums"
    least = 64 if quant.format in _WORDS else 32
    return ("sums" if group >= least else "weights"), "weights"


def _is_step(size: int, inputs: int, least: int) -> bool:
    """Whether groups of a size can be told apart step by step: powers of two, or the whole row."""
    return size == inputs or (size >= least and size & (size - 1) == 0)
