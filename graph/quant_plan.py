"""What a model is quantized to: the plan that calibration, or a quantized checkpoint, hands to the passes.

Plain data over tensors that stay in files, so that a plan is small for any model (docs/quantization.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

#: What the codes of a quantized weight are (docs/graph.md, "Quantized weights").
WeightFormat: TypeAlias = Literal["int8", "int4", "fp8", "fp4"]
#: Bits of a code where codes are packed.
CODE_BITS: Final[Mapping[str, int]] = {"int8": 8, "int4": 4, "fp8": 8, "fp4": 4}
#: What activations are rounded to before a product; "" leaves them alone.
ActivationFormat: TypeAlias = Literal["", "int8", "fp8", "nvfp4", "mxfp4", "mxfp8"]
CacheFormat: TypeAlias = Literal["auto", "fp8", "int8"]


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a file, C order from byte ``offset``: what a graph's external initializer refers to."""

    name: str
    file: Path
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class LinearPlan:
    """One matrix product [N, K].

    Attributes:
        format, group: of the weight's codes; ``group`` inputs share a scale, 0: the whole row. None where the
            checkpoint's weight is quantized already, and only the activations are decided here.
        scale: f32 [N, G]; ``offset`` likewise: w = code * scale + offset.
        codes: int8 (int8, int4) or uint8 (fp8, fp4) [N, K], where they are not simply the weight's numbers
            rounded: error-compensated rounding has made them, all scales taken into account.
        input_scale: f32 [K] or None: the product becomes (x * input_scale) · (w / input_scale)ᵀ.
        input_is_scaled: the layer before has multiplied x by ``input_scale`` already: its ``output_scale``.
        output_scale: f32 [N] or None: rows of w (and the bias) are multiplied by it before they are
            quantized.
        x_format: what x is rounded to, ``x_group`` inputs at a time (0: a row).
        x_scale: static scale of x for the whole tensor (nvfp4: the global one); 0: taken from the numbers.
    """

    format: WeightFormat | None = None
    group: int = 0
    scale: TensorRef | None = None
    offset: TensorRef | None = None
    codes: TensorRef | None = None
    input_scale: TensorRef | None = None
    input_is_scaled: bool = False
    output_scale: TensorRef | None = None
    x_format: ActivationFormat = ""
    x_group: int = 0
    x_scale: float = 0.0


@dataclass(frozen=True)
class CacheScales:
    """Scales of a cache layer, one for each KV head: stored number = value / scale."""

    k: tuple[float, ...]
    v: tuple[float, ...]


@dataclass(frozen=True)
class QuantPlan:
    """The whole model.

    Attributes:
        linears: by the name of the weight: the stored tensor's, or, in a quantized checkpoint, the
            parameter's.
        kv_format: of the cache; "auto" leaves it in the build's dtype.
        kv_scales: by cache layer; a layer that is not named has scales of 1.
    """

    linears: Mapping[str, LinearPlan] = field(default_factory=dict)
    kv_format: CacheFormat = "auto"
    kv_scales: Mapping[int, CacheScales] = field(default_factory=dict)
