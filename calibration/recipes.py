"""Quantization recipes by name: what becomes of weights and activations, as data."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from castiron.errors import BuildError

from ..graph.quant_plan import CODE_BITS, ActivationFormat, WeightFormat

#: What a scale is stored as: float32, float16, a float8 under one float32 for the tensor (NVFP4), a power of
#: two (OCP MX), or a float32 for each block of 128 x 128.
ScaleKind: TypeAlias = Literal["float32", "float16", "nvfp4", "e8m0", "block128"]
#: How codes are chosen. "nearest": rounding under the scales of the format's plain definition, which needs no
#: text; "compensated": scales are searched, and the rounding error of each column is made up for by the
#: others, on calibration activations.
Rounding: TypeAlias = Literal["nearest", "compensated"]

_SCALE_BITS: Final = {"float32": 32, "float16": 16, "nvfp4": 8, "e8m0": 8, "block128": 32}


@dataclass(frozen=True)
class Scheme:
    """How one matrix is held, and what its inputs are rounded to.

    Attributes:
        weight, group, scales: format of the codes, inputs that share a scale (0: a row), what a scale is.
        rounding: how codes are chosen.
        x_format, x_group: what inputs are rounded to, and how many share a scale (0: a row).
        x_static: the scale of inputs is a constant, from calibration; else it follows from the numbers.
        prescale: ModelOpt's search for scales of input channels: SmoothQuant, AWQ, or none.
    """

    weight: WeightFormat
    group: int
    scales: ScaleKind
    rounding: Rounding
    x_format: ActivationFormat = ""
    x_group: int = 0
    x_static: bool = False
    prescale: Literal["", "smoothquant", "awq_lite"] = ""

    def of_experts(self) -> Scheme:
        """The same formats for the matrices of experts: rounded to the nearest, scales from the numbers.

        Few of a text's tokens come to each expert, and compensation with too few is worse than rounding.
        """
        return replace(self, rounding="nearest", x_static=False, prescale="")

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight with its share of the scales of a group; scales of whole rows count nothing."""
        share = _SCALE_BITS[self.scales] / self.group if self.group else 0.0
        if self.scales == "block128":
            share /= self.group
        return CODE_BITS[self.weight] + share

    @property
    def needs_text(self) -> bool:
        """Whether calibration runs the model."""
        return self.rounding == "compensated" or self.x_static or bool(self.prescale)


@dataclass(frozen=True)
class Recipe:
    """What a name stands for. ``upgrade``: what ``--auto-quantize`` gives to sensitive layers instead."""

    name: str
    summary: str
    scheme: Scheme
    upgrade: Scheme | None = None

    @property
    def bits_per_weight(self) -> float:
        """Of the recipe's own scheme."""
        return self.scheme.bits_per_weight


#: The output projection, whatever the recipe: one int8 scale a row. It is the largest matrix of a small model
#: and sees few rows; held as int8 it costs a tenth of what the cheapest recipe costs (docs/quantization.md).
HEAD: Final = Scheme("int8", 0, "float32", "nearest")

_INT8 = Scheme("int8", 0, "float32", "compensated")
#: Activations with a scale a token: the first token of a text has numbers some thousand times those of the
#: others, and under a scale that reaches them these would fall below e4m3's normal range.
_FP8 = Scheme("fp8", 0, "float32", "compensated", "fp8")
_INT4 = Scheme("int4", 32, "float16", "compensated")

RECIPES: Final = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "fp8",
            "FP8 weights with a scale a row, FP8 activations with a scale a token",
            _FP8,
        ),
        Recipe(
            "fp8-block",
            "FP8 weights in blocks of 128 x 128, FP8 activations in groups of 128, as DeepSeek's",
            Scheme("fp8", 128, "block128", "compensated", "fp8", 128),
        ),
        Recipe(
            "int8-sq",
            "int8 weights with a scale a row, int8 activations in groups of 32, SmoothQuant",
            Scheme("int8", 0, "float32", "compensated", "int8", 32, prescale="smoothquant"),
        ),
        Recipe("int8-wo", "int8 weights with a scale a row", Scheme("int8", 0, "float32", "nearest")),
        Recipe("int4-awq", "int4 weights in groups of 32, calibrated", _INT4, _INT8),
        Recipe(
            "int4-wo",
            "int4 weights in groups of 32, without calibration",
            Scheme("int4", 32, "float16", "nearest"),
            Scheme("int8", 0, "float32", "nearest"),
        ),
        Recipe(
            "w4a8-awq",
            "int4 weights in groups of 32, FP8 activations with a scale a token",
            Scheme("int4", 32, "float16", "compensated", "fp8"),
            Scheme("int8", 0, "float32", "compensated", "fp8"),
        ),
        Recipe(
            "nvfp4",
            "NVFP4 weights and activations: e2m1 in groups of 16 under e4m3 scales",
            Scheme("fp4", 16, "nvfp4", "compensated", "nvfp4", 16, x_static=True),
            _FP8,
        ),
        Recipe(
            "mxfp4",
            "MXFP4 weights, MXFP8 activations: groups of 32 under powers of two (OCP MX)",
            Scheme("fp4", 32, "e8m0", "compensated", "mxfp8", 32),
            Scheme("fp8", 0, "float32", "compensated", "mxfp8", 32),
        ),
    )
}


def recipe_named(name: str) -> Recipe:
    """The recipe; BuildError for a name that is none, with the one that was probably meant."""
    try:
        return RECIPES[name]
    except KeyError:
        close = difflib.get_close_matches(name, RECIPES, 1, 0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise BuildError(f"unknown recipe {name!r}; expected one of {', '.join(RECIPES)}{hint}") from None
